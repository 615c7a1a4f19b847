"""The writer: what is read back, what other readers see, and what is left when it fails."""

import json
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from emberbox.errors import (
    CheckpointError,
    DuplicateName,
    EnvironmentProblem,
    HeaderSyntax,
    UnknownDtype,
    WrongSize,
)
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.safetensors_header import DTYPE_BITS
from emberbox.store.writer import CheckpointWriter


def _read(folder):
    (folder / "config.json").write_text("{}")
    checkpoint = open_checkpoint(folder)
    found = {}
    for name, info in checkpoint.tensors.items():
        buffer = bytearray(info.num_bytes)
        checkpoint.read_into(info, buffer)
        found[name] = (info.dtype, info.shape, bytes(buffer))
    return found


def _files(folder):
    return sorted(path.name for path in folder.iterdir())


TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.sampled_from(sorted(tag for tag, bits in DTYPE_BITS.items() if bits >= 8)),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(TENSORS, st.integers(1, 300))
def test_what_is_written_is_read_back(tmp_path, tensors, max_shard_bytes):
    rng = np.random.default_rng(0)
    expected = {}
    with CheckpointWriter(tmp_path / "w", max_shard_bytes, overwrite=True) as writer:
        for name, (dtype, shape) in tensors.items():
            data = rng.bytes(int(np.prod(shape)) * DTYPE_BITS[dtype] // 8)
            writer.add(name, dtype, shape, data)
            expected[name] = (dtype, shape, data)
    assert _read(tmp_path / "w") == expected
    infos = open_checkpoint(tmp_path / "w").tensors.values()
    for file in {info.file for info in infos}:
        inside = [info.num_bytes for info in infos if info.file == file]
        non_empty = [size for size in inside if size]
        assert sum(inside) <= max_shard_bytes or len(non_empty) == 1
    for info in infos:
        assert info.start % (DTYPE_BITS[info.dtype] // 8) == 0


def test_the_safetensors_library_loads_every_shard(tmp_path):
    weights = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "w": torch.randn(5, 3, dtype=torch.float32),
        "h": torch.randn(3, 3).to(torch.bfloat16),
        "f": torch.randn(3, 5).to(torch.float8_e4m3fn),
        "s": torch.tensor(-3, dtype=torch.int64),
    }
    tags = {"odd": "U8", "w": "F32", "h": "BF16", "f": "F8_E4M3", "s": "I64"}
    for max_shard_bytes, expected_files in ((10_000, 1), (60, 3)):
        folder = tmp_path / str(max_shard_bytes)
        with CheckpointWriter(folder, max_shard_bytes) as writer:
            for name, weight in weights.items():
                data = weight.reshape(-1).view(torch.uint8).numpy()
                writer.add(name, tags[name], tuple(weight.shape), data)
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) == expected_files
        loaded = {name: t for file in files for name, t in load_file(file).items()}
        assert loaded.keys() == weights.keys()
        for name, weight in weights.items():
            assert loaded[name].dtype == weight.dtype
            assert loaded[name].shape == weight.shape
            assert torch.equal(
                loaded[name].reshape(-1).view(torch.uint8), weight.reshape(-1).view(torch.uint8)
            )


def test_shards_and_index_have_the_usual_names(tmp_path):
    with CheckpointWriter(tmp_path / "w", 4) as writer:
        for name in "cab":
            writer.add(name, "U8", (3,), b"xyz")
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert _files(tmp_path / "w") == [*shards, "model.safetensors.index.json"]
    assert json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 9},
        "weight_map": {"a": shards[1], "b": shards[2], "c": shards[0]},
    }


def test_a_tensor_larger_than_a_shard_is_alone_in_one(tmp_path):
    with CheckpointWriter(tmp_path / "w", 4) as writer:
        for name, size in (("a", 2), ("big", 9), ("b", 2), ("c", 2)):
            writer.add(name, "U8", (size,), bytes(size))
    (tmp_path / "w" / "config.json").write_text("{}")
    where = {n: i.file.name[6:11] for n, i in open_checkpoint(tmp_path / "w").tensors.items()}
    assert where == {"a": "00001", "big": "00002", "b": "00003", "c": "00003"}


def test_nothing_has_its_final_name_before_close(tmp_path):
    with CheckpointWriter(tmp_path / "w", 4) as writer:
        for name in "ab":
            writer.add(name, "U8", (3,), b"xyz")
        assert _files(tmp_path / "w")
        assert all(name.endswith(".partial") for name in _files(tmp_path / "w"))


def test_a_buffer_may_be_reused_after_add(tmp_path):
    buffer = np.zeros(3, dtype=np.uint8)
    with CheckpointWriter(tmp_path / "w", 100) as writer:
        for value, name in enumerate("ab"):
            buffer[:] = value
            writer.add(name, "U8", (3,), buffer)
    assert {n: data for n, (_, _, data) in _read(tmp_path / "w").items()} == {
        "a": bytes(3),
        "b": b"\x01\x01\x01",
    }


class _Stop(Exception):
    pass


def test_an_exception_removes_every_trace(tmp_path):
    with pytest.raises(_Stop), CheckpointWriter(tmp_path / "w", 2) as writer:
        for name in "abc":
            writer.add(name, "U8", (2,), b"xy")
        raise _Stop
    assert not (tmp_path / "w").exists()


def test_an_exception_leaves_what_others_put_there(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(_Stop), CheckpointWriter(tmp_path, 2) as writer:
        writer.add("a", "U8", (2,), b"xy")
        raise _Stop
    assert _files(tmp_path) == ["config.json"]


def test_an_exception_leaves_an_empty_folder_that_was_there_before(tmp_path):
    with pytest.raises(_Stop), CheckpointWriter(tmp_path, 2):
        raise _Stop
    assert _files(tmp_path) == []


def test_an_add_that_failed_may_be_tried_again(tmp_path, monkeypatch):
    class FullOnce:
        def __init__(self, file):
            self.file, self.failures = file, 0

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, view):
            if not self.failures:
                self.failures += 1
                self.file.write(view[:1])
                raise OSError(28, "No space left on device")
            self.file.write(view)

    with CheckpointWriter(tmp_path, 100) as writer:
        writer.add("a", "U8", (2,), b"aa")
        monkeypatch.setattr(writer, "_data", FullOnce(writer._data))
        with pytest.raises(EnvironmentProblem, match="No space left"):
            writer.add("b", "U8", (3,), b"bbb")
        writer.add("b", "U8", (3,), b"bbb")
    assert _read(tmp_path) == {"a": ("U8", (2,), b"aa"), "b": ("U8", (3,), b"bbb")}


def test_an_existing_checkpoint_is_not_overwritten_unasked(tmp_path):
    with CheckpointWriter(tmp_path, 100) as writer:
        writer.add("old", "U8", (2,), b"xy")
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="holds weights already"):
        CheckpointWriter(tmp_path, 100)
    assert _files(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_overwriting_removes_shards_of_the_old_checkpoint(tmp_path):
    with CheckpointWriter(tmp_path, 2) as writer:
        for name in "abc":
            writer.add(name, "U8", (2,), b"xy")
    with CheckpointWriter(tmp_path, 100, overwrite=True) as writer:
        writer.add("new", "U8", (1,), b"n")
        assert len(_files(tmp_path)) == 5
    assert _files(tmp_path) == ["model.safetensors"]
    assert _read(tmp_path) == {"new": ("U8", (1,), b"n")}


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_a_failure_while_overwriting_brings_the_old_checkpoint_back(
    tmp_path, monkeypatch, fails_at
):
    with CheckpointWriter(tmp_path, 2) as writer:
        for name in "old":
            writer.add(name, "U8", (2,), name.encode() * 2)
    old_files, old_tensors = _files(tmp_path), _read(tmp_path)
    path_type = type(tmp_path)
    replace, calls = path_type.replace, []

    def fail_once(self, target):
        calls.append(target)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    writer = CheckpointWriter(tmp_path, 2, overwrite=True)
    for name in "abc":
        writer.add(name, "U8", (2,), b"xy")
    monkeypatch.setattr(path_type, "replace", fail_once)
    with pytest.raises(EnvironmentProblem, match="No space left"):
        writer.close()
    assert _files(tmp_path) == sorted([*old_files, "config.json"])
    assert _read(tmp_path) == old_tensors


def test_a_full_disk_while_flushing_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(EnvironmentProblem, match="No space left"),
        CheckpointWriter(tmp_path / "w", 2) as writer,
    ):
        writer.add("a", "U8", (2,), b"xy")
    assert not (tmp_path / "w").exists()


def test_no_tensors_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no tensor"), CheckpointWriter(tmp_path / "w", 2):
        pass
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("a", "U8", (2,), b"xy"), DuplicateName),
        (("b", "u8", (2,), b"xy"), UnknownDtype),
        (("b", "U8", (3,), b"xy"), WrongSize),
        (("b", "U8", (-1, -2), b"xy"), WrongSize),
        (("b", "F4", (3,), b"xy"), WrongSize),
        (("__metadata__", "U8", (2,), b"xy"), HeaderSyntax),
        (("\ud800", "U8", (2,), b"xy"), HeaderSyntax),
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path, arguments, error):
    with CheckpointWriter(tmp_path, 100) as writer:
        writer.add("a", "U8", (2,), b"xy")
        with pytest.raises(error):
            writer.add(*arguments)
    assert _read(tmp_path) == {"a": ("U8", (2,), b"xy")}


def test_a_closed_writer_takes_no_more(tmp_path):
    writer = CheckpointWriter(tmp_path, 100)
    writer.add("a", "U8", (2,), b"xy")
    writer.close()
    writer.close()
    writer.discard()
    with pytest.raises(ValueError, match="closed"):
        writer.add("b", "U8", (2,), b"xy")
    assert _files(tmp_path) == ["model.safetensors"]
