"""Compiles CUDA text to machine code for one architecture, and keeps the result.

The only place with a compiler option in it. NVRTC compiles to a cubin, never to PTX: what was
tested is what runs, and nothing is compiled again by a driver. A cubin lies in the cache under a
hash of everything that made it: source, macros, headers, options, architecture, version of NVRTC.
No GPU is needed to fill the cache. Knows no op.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from emberbox.errors import EnvironmentProblem, OpError, SettingsError
from emberbox.settings import BuildSettings, from_environment

OPTIONS: Mapping[str, Any] = {"std": "c++17"}
# Wheels that carry cuda_fp16.h, for CUDA 13 and 12.
RUNTIME_WHEELS = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
INSTALL_HINT = (
    "pip install 'emberbox[cuda]', or "
    "pip install cuda-core cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime"
)


@dataclass(frozen=True, slots=True)
class Source:
    """One .cu file, the headers of our own that it includes, and its macros."""

    path: Path
    macros: Mapping[str, int] = field(default_factory=dict)
    headers: tuple[Path, ...] = ()


def build(source: Source, arch: str, cache_folder: Path | None = None) -> Path:
    """The cubin of a source for an architecture such as "sm_90"; compiled if it is not there.

    `cache_folder`: None takes EMBERBOX_CACHE. Raises EnvironmentProblem where NVRTC or its headers
    are missing or the cache cannot be written, OpError where the source does not compile.
    """
    check_architecture(arch)
    folder = default_cache() if cache_folder is None else cache_folder
    target = folder / f"{source.path.stem}-{arch}-{cache_key(source, arch)}.cubin"
    if not target.exists():
        _write(target, compile_cubin(source, arch))
    return target


def check_architecture(arch: str) -> None:
    """Raises SettingsError for what is no architecture's name."""
    if not re.fullmatch("sm_[0-9]{2,3}[af]?", arch):
        raise SettingsError(f"architecture: {arch!r}", hint="expected one such as sm_90 or sm_121")


def default_cache() -> Path:
    """The folder of EMBERBOX_CACHE, or ~/.cache/emberbox. Raises SettingsError."""
    named = from_environment(BuildSettings).cache
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise SettingsError(
            f"EMBERBOX_CACHE: {named!r}: {error}", hint="give the whole path of a folder"
        ) from error


def cache_key(source: Source, arch: str) -> str:
    """20 hex digits of everything that makes the cubin."""
    parts = {
        "source": source.path.read_text(encoding="utf-8"),
        "headers": {path.name: path.read_text(encoding="utf-8") for path in source.headers},
        "macros": dict(sorted(source.macros.items())),
        "options": dict(OPTIONS),
        "arch": arch,
        "nvrtc": nvrtc_version(),
        "runtime": _runtime_headers()[1],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def compile_cubin(source: Source, arch: str) -> bytes:
    """Compiles without looking into the cache."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as missing:
        raise _no_compiler(missing) from missing
    folders = [_runtime_headers()[0], *dict.fromkeys(path.parent for path in source.headers)]
    options = ProgramOptions(
        name=source.path.name,
        arch=arch,
        include_path=[str(folder) for folder in folders],
        define_macro=[(name, str(value)) for name, value in sorted(source.macros.items())] or None,
        **OPTIONS,
    )
    try:
        program = Program(source.path.read_text(encoding="utf-8"), "c++", options)
        return bytes(program.compile("cubin").code)
    except Exception as failed:  # cuda-core's own exceptions have no public base
        raise OpError(f"{source.path.name} does not compile for {arch}: {failed}") from failed


@cache
def nvrtc_version() -> str:
    """Such as "13.0". Raises EnvironmentProblem where there is no NVRTC."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as missing:
        raise _no_compiler(missing) from missing
    return f"{major}.{minor}"


def _no_compiler(missing: BaseException) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"CUDA kernels are compiled by NVRTC through cuda-core ({missing})", hint=INSTALL_HINT
    )


@cache
def _runtime_headers() -> tuple[Path, str]:
    """The folder of cuda_fp16.h in a wheel, and the wheel's version."""
    for name in RUNTIME_WHEELS:
        try:
            wheel = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for file in wheel.files or ():
            path = Path(str(wheel.locate_file(file)))
            if file.name == "cuda_fp16.h" and path.exists():
                return path.parent, wheel.version
    raise EnvironmentProblem(
        f"cuda_fp16.h was not found: none of {', '.join(RUNTIME_WHEELS)} is installed",
        hint=INSTALL_HINT,
    )


def _write(target: Path, cubin: bytes) -> None:
    """Whole or not at all: two processes may build the same kernel."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            file.write(cubin)
        Path(file.name).replace(target)
    except OSError as problem:
        raise EnvironmentProblem(
            f"cache of kernels: {target.parent} cannot be written ({problem})",
            hint="set EMBERBOX_CACHE to a folder that can",
        ) from problem
