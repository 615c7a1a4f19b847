"""The builder of CUDA kernels: what its cache depends on, what it says when it cannot."""

from pathlib import Path

import pytest

from emberbox.errors import EnvironmentProblem, OpError, SettingsError
from emberbox.ops import build as module
from emberbox.ops.build import Source, build, cache_key, default_cache

KERNEL = """
#include <cuda_fp16.h>
extern "C" __global__ void twice(__half* x) { x[threadIdx.x] = __hmul(x[threadIdx.x], NUMBER); }
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "twice.cu"
    path.write_text(KERNEL, encoding="utf-8")
    header = tmp_path / "part.cuh"
    header.write_text("// nothing\n", encoding="utf-8")
    return Source(path, {"NUMBER": 2}, (header,))


@pytest.fixture
def no_nvrtc(monkeypatch):
    """A machine with versions to name, but nothing that compiles."""
    monkeypatch.setattr(module, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(module, "_runtime_headers", lambda: (Path("include"), "13.0.1"))
    calls = []

    def compiled(source, arch):
        calls.append((source, arch))
        return b"cubin"

    monkeypatch.setattr(module, "compile_cubin", compiled)
    return calls


def compiler_or_skip():
    """Skips where NVRTC is not installed: tests need no CUDA package."""
    try:
        module.nvrtc_version()
        module._runtime_headers()
    except EnvironmentProblem as missing:
        pytest.skip(f"NVRTC or its headers are not installed: {missing.message}")


def test_a_kernel_is_compiled_once_and_then_found(source, no_nvrtc, tmp_path):
    first = build(source, "sm_90", tmp_path / "cache")
    assert first.read_bytes() == b"cubin"
    assert build(source, "sm_90", tmp_path / "cache") == first
    assert len(no_nvrtc) == 1
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_everything_that_makes_a_cubin_is_in_its_key(source, no_nvrtc, monkeypatch):
    keys = [cache_key(source, "sm_90"), cache_key(source, "sm_121")]
    keys.append(cache_key(Source(source.path, {"NUMBER": 3}, source.headers), "sm_90"))
    source.headers[0].write_text("// changed\n", encoding="utf-8")
    keys.append(cache_key(source, "sm_90"))
    source.path.write_text(KERNEL + "\n", encoding="utf-8")
    keys.append(cache_key(source, "sm_90"))
    monkeypatch.setattr(module, "nvrtc_version", lambda: "13.1")
    keys.append(cache_key(source, "sm_90"))
    monkeypatch.setattr(module, "_runtime_headers", lambda: (Path("include"), "13.1.0"))
    keys.append(cache_key(source, "sm_90"))
    monkeypatch.setattr(module, "OPTIONS", {"std": "c++20"})
    keys.append(cache_key(source, "sm_90"))
    assert len(set(keys)) == len(keys)


def test_the_folder_of_the_cache_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EMBERBOX_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.delenv("EMBERBOX_CACHE")
    assert default_cache() == Path.home() / ".cache" / "emberbox"


def test_a_home_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("EMBERBOX_CACHE", "~no-such-user/x")
    with pytest.raises(SettingsError, match="EMBERBOX_CACHE: '~no-such-user/x'"):
        default_cache()


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_121", "sm_121f"])
def test_a_known_form_is_taken(source, no_nvrtc, arch, tmp_path):
    assert build(source, arch, tmp_path).name.startswith(f"twice-{arch}-")


@pytest.mark.parametrize(
    "arch",
    [
        "",
        "90",
        "sm_",
        "sm_9",
        "sm_1211",
        "compute_90",
        "sm_90; rm",
        "sm_90af",
        "sm_９０",
        "sm_90\n",
    ],
)
def test_an_unknown_architecture_is_refused(source, arch, tmp_path):
    with pytest.raises(SettingsError, match="expected one such as sm_90"):
        build(source, arch, tmp_path)


def test_a_cache_that_cannot_be_written_names_its_variable(source, no_nvrtc, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(EnvironmentProblem, match="EMBERBOX_CACHE"):
        build(source, "sm_90", tmp_path / "file" / "cache")


def test_cubins_are_made_without_a_gpu(source, tmp_path):
    compiler_or_skip()
    for arch in ("sm_90", "sm_121"):
        assert build(source, arch, tmp_path / "cache").read_bytes()[:4] == b"\x7fELF"


def test_an_error_of_the_compiler_is_shown(source, tmp_path):
    compiler_or_skip()
    with pytest.raises(OpError, match=r"(?s)twice.cu does not compile for sm_90.*NUMBER"):
        build(Source(source.path), "sm_90", tmp_path / "cache")
