"""Where a conversion may write, and the room it asks for."""

import os
from collections import namedtuple

import pytest

from emberbox.compress import disk
from emberbox.compress.journal import Job
from emberbox.compress.output import Output
from emberbox.errors import CheckpointError, EnvironmentProblem, SettingsError

Usage = namedtuple("Usage", "total used free")
GB = 10**9


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes are free; returns the places that were asked about."""
    asked = []

    def set_free(num_bytes):
        def usage(place):
            asked.append(place)
            return Usage(0, 0, num_bytes)

        monkeypatch.setattr(disk.shutil, "disk_usage", usage)
        return asked

    return set_free


def _job(unit_bytes, state_bytes=0):
    return Job(
        plan_digest="d", unit_bytes=unit_bytes, max_shard_bytes=2 * GB, state_bytes=state_bytes
    )


def _open(folder, job, resume=False):
    return Output.open(folder, job, source=folder.parent / "source", resume=resume)


def test_too_little_space_is_refused_before_anything_is_made(tmp_path, free):
    needed = 4 * GB + 3 * GB + 2 * GB + disk.OTHER_BYTES
    asked = free(needed - 1)
    folder = tmp_path / "not" / "yet"
    with pytest.raises(EnvironmentProblem) as caught:
        _open(folder, _job({"a": GB, "b": 3 * GB}, state_bytes=GB))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}: 9.10 GB needed, 9.10 GB free (4.00 GB of weights")
    assert "3.00 GB for the largest unit" in text
    assert "2.00 GB of state" in text
    assert asked == [tmp_path]
    assert list(tmp_path.iterdir()) == []


def test_just_enough_space_is_enough(tmp_path, free):
    free(4 * GB + 3 * GB + 2 * GB + disk.OTHER_BYTES)
    _open(tmp_path / "dst", _job({"a": GB, "b": 3 * GB}, state_bytes=GB)).close()


def test_going_on_needs_room_for_the_rest_only(tmp_path, free):
    free(GB)
    job = _job({"a": 8, "b": 100}, state_bytes=1000)
    with _open(tmp_path / "dst", job) as output, output.unit("a") as unit:
        unit.add("x", "U8", (8,), bytes(8))
        unit.save_state([bytes(700)])
    free(100 + 100 + 2000 - 700 + disk.OTHER_BYTES)
    _open(tmp_path / "dst", job, resume=True).close()
    free(100 + 100 + 2000 - 700 + disk.OTHER_BYTES - 1)
    with pytest.raises(EnvironmentProblem, match="needed"):
        _open(tmp_path / "dst", job, resume=True)


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("source", "is the folder to read from"),
        ("source/x/y", "lies inside"),
        ("link", "is the folder to read from"),
        ("link/x", "lies inside"),
        ("other/../source", "is the folder to read from"),
    ],
)
def test_the_source_and_what_is_in_it_are_refused(tmp_path, folder, told):
    (tmp_path / "source").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "source")
    with pytest.raises(SettingsError, match=told):
        disk.require_apart(tmp_path / "source", tmp_path / folder)


def test_a_folder_beside_the_source_is_fine(tmp_path):
    disk.require_apart(tmp_path / "source", tmp_path / "source-2")
    disk.require_apart(tmp_path / "a" / "source", tmp_path / "a")


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "dst"):
        with pytest.raises(EnvironmentProblem, match="file: is a file, expected a folder"):
            disk.require_writable(folder)


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda place, _: place != tmp_path)
    with pytest.raises(EnvironmentProblem, match="no permission to write"):
        disk.require_writable(tmp_path / "dst")


def test_a_relative_folder_has_a_nearest_parent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert disk.nearest_existing(disk.Path("a/b")) == tmp_path


@pytest.mark.parametrize("resume", [False, True])
def test_a_plan_refuses_what_the_run_refuses(tmp_path, resume):
    job, source = _job({"a": 8}), tmp_path / "source"
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes").write_text("precious")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for name, kind, told in (
        ("foreign", CheckpointError, "foreign: holds other files: notes"),
        ("link", EnvironmentProblem, "link: is a link that leads nowhere, expected a folder"),
        ("link/dst", EnvironmentProblem, "link: is a link that leads nowhere, expected a folder"),
        ("loop", EnvironmentProblem, "loop: is a link that leads nowhere, expected a folder"),
    ):
        with pytest.raises(kind, match=told) as planned:
            disk.look(tmp_path / name, source, job, resume=resume)
        with pytest.raises(kind) as run:
            _open(tmp_path / name, job, resume=resume)
        assert str(run.value) == str(planned.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "link", "loop"]


def test_resuming_a_complete_folder_is_not_refused(tmp_path):
    (tmp_path / "SHA256SUMS").write_text("")
    job, source = _job({"a": 8}), tmp_path.parent / "source"
    assert disk.look(tmp_path, source, job, resume=True).place == tmp_path
    with pytest.raises(CheckpointError, match="holds other files: SHA256SUMS"):
        _open(tmp_path, job, resume=True)  # nothing is begun there all the same
    assert [path.name for path in tmp_path.iterdir()] == ["SHA256SUMS"]
