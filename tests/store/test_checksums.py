"""SHA256SUMS names what differs, is missing, or came later."""

import os
import subprocess

import pytest

from emberbox.errors import CheckpointError
from emberbox.store import checksums
from emberbox.store.checksums import (
    SUMS_NAME,
    digest_file,
    listed_sha256,
    read_sums,
    sums_text,
    verify_checksums,
)


@pytest.fixture
def folder(tmp_path):
    names = ["b", "a file", "ä.json", "empty"]
    for name in names:
        (tmp_path / name).write_text("" if name == "empty" else name)
    sums = {name: digest_file(tmp_path / name).sha256 for name in names}
    (tmp_path / SUMS_NAME).write_text(sums_text(sums), "utf-8")
    return tmp_path


def test_an_unchanged_folder_passes_here_and_in_sha256sum(folder):
    told = []
    assert verify_checksums(folder, told.append) == 4
    assert sum(told) == 1 + 6 + 7
    subprocess.run(["sha256sum", "-c", "--quiet", SUMS_NAME], cwd=folder, check=True)


def test_every_fault_is_named_at_once(folder):
    (folder / "a file").write_text("a filf")
    (folder / "b").unlink()
    (folder / "sub").mkdir()
    (folder / "sub" / "later").write_text("")
    with pytest.raises(CheckpointError) as caught:
        verify_checksums(folder)
    text = str(caught.value)
    assert "3 files are not as" in text
    assert "b: listed, but not there" in text
    assert "sub/later: there, but not listed" in text
    assert "a file: sha256 " in text
    assert "empty" not in text


def test_hidden_files_are_not_part_of_a_checkpoint(folder):
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x").write_text("")
    (folder / ".gitattributes").write_text("")
    assert verify_checksums(folder) == 4


@pytest.mark.parametrize("line", ["", "abc  x", f"{'0' * 64} x", f"{'0' * 64}  a\\b"])
def test_a_list_of_another_form_is_refused(folder, line):
    with (folder / SUMS_NAME).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(CheckpointError, match="line 5 is not a sha256"):
        verify_checksums(folder)


def test_a_folder_without_a_list_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        verify_checksums(tmp_path)


def test_what_is_wrong_with_a_list_is_said(tmp_path, monkeypatch):
    path, line = tmp_path / SUMS_NAME, f"{'0' * 64}  b\n"
    for text, told in (
        (line + line.replace("b", "c") + line, "line 3 lists 'b' as line 1 does"),
        ("\ufeff" + line, "begins with a byte order mark"),
        ("", "lists no file"),
    ):
        path.write_text(text, "utf-8")
        with pytest.raises(CheckpointError, match=told):
            read_sums(path)
    path.write_bytes(line.encode() + b"\xff")
    with pytest.raises(CheckpointError, match="not UTF-8 at byte 68"):
        read_sums(path)
    path.write_text(line)
    monkeypatch.setattr(checksums, "MAX_SUMS_BYTES", len(line))
    assert read_sums(path) == {"b": "0" * 64}
    monkeypatch.setattr(checksums, "MAX_SUMS_BYTES", len(line) - 1)
    with pytest.raises(CheckpointError, match="longer than the limit of 67 bytes"):
        read_sums(path)


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        digest_file(folder / "pipe")
    with pytest.raises(CheckpointError, match="pipe: there, but not listed"):
        verify_checksums(folder)
    (folder / SUMS_NAME).unlink()
    os.mkfifo(folder / SUMS_NAME)
    for read in (lambda: listed_sha256(folder, "b"), lambda: read_sums(folder / SUMS_NAME)):
        with pytest.raises(CheckpointError, match="SUMS: cannot be read: not a regular file"):
            read()
