"""Every attack is answered by its own error, which names the file at fault."""

import os
import tracemalloc

import pytest

from emberbox import errors
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.safetensors_header import read_header
from tests.attacks.builder import FILE_ATTACKS, FOLDER_ATTACKS, honest_folder


@pytest.mark.parametrize("attack", FILE_ATTACKS, ids=lambda attack: attack.name)
def test_a_hostile_file_is_refused_with_its_own_error(attack, tmp_path):
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(attack.content)
    with pytest.raises(errors.HeaderError) as caught:
        read_header(path)
    assert type(caught.value) is attack.error
    assert str(path) in str(caught.value)
    assert attack.says in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("attack", FILE_ATTACKS, ids=lambda attack: attack.name)
def test_a_hostile_file_costs_memory_in_proportion_to_its_size(attack, tmp_path):
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(attack.content)
    tracemalloc.start()
    try:
        with pytest.raises(errors.HeaderError):
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000 + 40 * len(attack.content)


def test_every_header_error_has_an_attack():
    assert {attack.error for attack in FILE_ATTACKS} == set(errors.HeaderError.__subclasses__())


@pytest.mark.parametrize("attack", FOLDER_ATTACKS, ids=lambda attack: attack.name)
def test_a_hostile_folder_is_refused_with_its_own_error(attack, tmp_path):
    folder = tmp_path / "checkpoint"
    honest_folder(folder)
    assert set(open_checkpoint(folder).tensors) == {"a", "b", "c"}
    attack.change(folder)
    with pytest.raises(errors.CheckpointError) as caught:
        open_checkpoint(folder)
    assert type(caught.value) is attack.error
    assert str(folder) in str(caught.value)
    assert attack.says in str(caught.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(errors.CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    if not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes on this system")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(errors.HeaderError, match="not a regular file"):
        read_header(tmp_path / "pipe.safetensors")


def test_every_tensor_that_stands_twice_is_named(tmp_path):
    folder = tmp_path / "checkpoint"
    honest_folder(folder)
    (folder / "mtp").mkdir()
    (folder / "mtp" / "m.safetensors").write_bytes((folder / "s1.safetensors").read_bytes())
    with pytest.raises(errors.DuplicateName) as caught:
        open_checkpoint(folder)
    assert "'a' is in" in str(caught.value)
    assert "'b' is in" in str(caught.value)
