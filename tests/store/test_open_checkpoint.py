"""Folders: what lies where, over shards, a sub-folder and links; and reading the bytes."""

import json
import threading

import numpy as np
import pytest

from emberbox.errors import CheckpointError, MissingShard, TruncatedFile, WrongSize
from emberbox.store.checkpoint import open_checkpoint
from tests.attacks.builder import build, honest_folder


def _single(folder, name="model.safetensors", tensor="x", data=b"12345"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"vocab_size": 3}')
    entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    (folder / name).write_bytes(build({tensor: entry}, data))
    return folder


def test_one_file_needs_no_index(tmp_path):
    checkpoint = open_checkpoint(_single(tmp_path / "one"))
    assert checkpoint.config == {"vocab_size": 3}
    assert checkpoint.mtp_config is None
    assert checkpoint.num_bytes == 5
    buffer = bytearray(5)
    checkpoint.read_into(checkpoint.tensors["x"], buffer)
    assert buffer == b"12345"


def test_shards_are_merged_by_the_index(tmp_path):
    honest_folder(tmp_path / "two")
    checkpoint = open_checkpoint(tmp_path / "two")
    assert {name: info.file.name for name, info in checkpoint.tensors.items()} == {
        "a": "s1.safetensors",
        "b": "s1.safetensors",
        "c": "s2.safetensors",
    }
    buffer = np.zeros((2, 2), dtype=np.uint8)
    checkpoint.read_into(checkpoint.tensors["c"], buffer)
    assert buffer.tobytes() == b"cccc"


def test_one_shard_of_several_alone_is_an_incomplete_download(tmp_path):
    folder = _single(tmp_path / "part", name="model-00001-of-00002.safetensors")
    with pytest.raises(MissingShard, match="one shard of several"):
        open_checkpoint(folder)


def test_the_mtp_folder_is_merged_and_keeps_its_own_config(tmp_path):
    folder = _single(tmp_path / "trunk")
    _single(folder / "mtp", name="draft.safetensors", tensor="y", data=b"yyy")
    (folder / "mtp" / "config.json").write_text('{"n_routed_experts": 7}')
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensors) == {"x", "y"}
    assert checkpoint.mtp_config == {"n_routed_experts": 7}
    assert checkpoint.tensors["y"].file == folder / "mtp" / "draft.safetensors"
    (folder / "mtp" / "config.json").unlink()
    assert open_checkpoint(folder).mtp_config is None


def test_files_may_be_links_out_of_the_folder(tmp_path):
    blobs, folder = _single(tmp_path / "blobs"), tmp_path / "snapshot"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(blobs / name)
    assert open_checkpoint(folder).tensors["x"].shape == (5,)


def test_the_table_of_tensors_cannot_be_changed(tmp_path):
    checkpoint = open_checkpoint(_single(tmp_path / "one"))
    with pytest.raises(TypeError):
        checkpoint.tensors["x"] = None


@pytest.mark.parametrize("size", [0, 4, 6])
def test_a_buffer_of_another_size_is_refused(tmp_path, size):
    checkpoint = open_checkpoint(_single(tmp_path / "one"))
    with pytest.raises(WrongSize, match=rf"'x' has 5 bytes, the buffer to read into {size}"):
        checkpoint.read_into(checkpoint.tensors["x"], bytearray(size))


def test_a_strided_or_read_only_buffer_is_a_type_error(tmp_path):
    checkpoint = open_checkpoint(_single(tmp_path / "one"))
    for buffer in (np.zeros(10, dtype=np.uint8)[::2], memoryview(bytes(5))):
        with pytest.raises(TypeError):
            checkpoint.read_into(checkpoint.tensors["x"], buffer)


def test_a_file_that_shrank_after_opening_is_truncated(tmp_path):
    checkpoint = open_checkpoint(_single(tmp_path / "one"))
    path = checkpoint.tensors["x"].file
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(TruncatedFile, match="'x' ends after 3 of 5 bytes"):
        checkpoint.read_into(checkpoint.tensors["x"], bytearray(5))


def test_a_file_that_vanished_after_opening_is_a_checkpoint_error(tmp_path):
    checkpoint = open_checkpoint(_single(tmp_path / "one"))
    checkpoint.tensors["x"].file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read_into(checkpoint.tensors["x"], bytearray(5))


def test_an_empty_tensor_reads_into_an_empty_buffer(tmp_path):
    checkpoint = open_checkpoint(_single(tmp_path / "one", data=b""))
    checkpoint.read_into(checkpoint.tensors["x"], np.zeros((0, 3), dtype=np.float32))


def test_short_reads_of_the_system_are_continued(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(_single(tmp_path / "one"))

    class Dribbling:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def seek(self, position):
            self.file.seek(position)

        def readinto(self, view):
            return self.file.readinto(view[:2])

    path_type = type(checkpoint.folder)
    open_file = path_type.open
    monkeypatch.setattr(path_type, "open", lambda *a, **k: Dribbling(open_file(*a, **k)))
    buffer = bytearray(5)
    checkpoint.read_into(checkpoint.tensors["x"], buffer)
    assert buffer == b"12345"


def test_threads_read_the_same_file_at_once(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    rows = np.arange(64 * 1000, dtype=np.uint32).reshape(64, 1000)
    header = {
        str(i): {"dtype": "U32", "shape": [1000], "data_offsets": [4000 * i, 4000 * (i + 1)]}
        for i in range(64)
    }
    (folder / "model.safetensors").write_bytes(build(header, rows.tobytes()))
    checkpoint = open_checkpoint(folder)
    read = np.zeros_like(rows)

    def work(first):
        for i in range(first, 64, 4):
            checkpoint.read_into(checkpoint.tensors[str(i)], read[i])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(read, rows)


def test_unknown_keys_of_config_are_kept_for_the_model_to_judge(tmp_path):
    folder = _single(tmp_path / "one")
    config = {"a": [1, {"b": None}], "text_config": {"x": 1.5}}
    (folder / "config.json").write_text("\n " + json.dumps(config) + "\n")
    assert open_checkpoint(folder).config == config
