"""A folder is compared with all it has, and what it lacks is said; the verb `verify`."""

import errno
import json
import os
import shutil
import subprocess

import pytest

from emberbox.cli.main import main
from emberbox.errors import CheckpointError
from emberbox.store import strict_json
from emberbox.store.checkpoint import INDEX_NAME, open_checkpoint
from emberbox.store.checksums import SUMS_NAME
from emberbox.store.digests import DIGESTS_NAME
from emberbox.store.durable import remove
from emberbox.store.verification import Fault, num_bytes_of, verify_folder
from tests.helpers.nano import NANO
from tests.helpers.whole_folder import plain_folder, whole_folder, write_sums

BASE2 = NANO.with_name("ember-nano-base2")
SHARD = "model-00005-of-00012.safetensors"


@pytest.fixture
def base2(tmp_path):
    return shutil.copytree(BASE2, tmp_path / "base2")


def flip(path, position):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def test_shipped_folders_are_good(capsys):
    assert main(["verify", str(BASE2), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "is_good": True,
        "num_files": 24,
        "num_tensors": 2068,
        "faults": [],
        "unknown": [],
    }
    assert main(["verify", str(NANO)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == (
        f"{NANO}: good; 0 files and 685 tensors compared, headers, sizes and index checked"
    )
    assert shown[1:] == [f"not compared: no {SUMS_NAME}: files beside the weights"]


def test_every_byte_is_told_to_the_bar(base2):
    told = []
    verify_folder(base2, told.append)
    sums = (base2 / SUMS_NAME).stat().st_size
    assert sum(told) == num_bytes_of(base2) - sums


def test_a_changed_header_is_told_from_a_changed_tensor(base2):
    path = base2 / SHARD
    at = path.read_bytes().index(b'"pt"') + 1
    flip(path, at)  # "pt" -> "qt": still a header that can be read
    start = min(i.start for i in open_checkpoint(base2).tensors.values() if i.file == path)
    (fault,) = verify_folder(base2).faults
    assert fault.file == SHARD
    assert fault.tensors == ()
    assert fault.what.endswith(f"so its header is changed (bytes 0 to {start})")


def test_several_tensors_of_a_file_are_all_named(base2):
    infos = [i for i in open_checkpoint(base2).tensors.values() if i.file.name == SHARD][3:9:5]
    for info in infos:
        flip(base2 / SHARD, info.stop - 1)
    (fault,) = verify_folder(base2).faults
    assert fault.tensors == tuple(info.name for info in infos)
    assert all(repr(info.name) in fault.what for info in infos)


def test_without_digests_the_file_is_named_and_how_many_tensors_it_holds(base2):
    lines = (base2 / SUMS_NAME).read_text().splitlines(keepends=True)
    (base2 / SUMS_NAME).write_text("".join(line for line in lines if DIGESTS_NAME not in line))
    (base2 / DIGESTS_NAME).unlink()
    flip(base2 / SHARD, -1)
    verdict = verify_folder(base2)
    (fault,) = verdict.faults
    count = sum(i.file.name == SHARD for i in open_checkpoint(base2).tensors.values())
    assert f"one or more of its {count} tensors, or its header, are damaged" in fault.what
    assert verdict.unknown == (f"no {DIGESTS_NAME}: which tensors of a file are damaged",)


def test_a_folder_with_neither_says_that_bytes_are_not_compared(tmp_path, capsys):
    folder = plain_folder(tmp_path)
    assert main(["verify", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "0 files and 0 tensors compared, headers, sizes and index checked" in shown
    assert f"not compared: no {SUMS_NAME}: files beside the weights" in shown
    assert f"not compared: neither {SUMS_NAME} nor {DIGESTS_NAME}: the bytes of 3 of 3" in shown


def test_what_is_always_checked_is_found_without_either(tmp_path):
    folder = plain_folder(tmp_path)
    path = folder / "s2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (fault,) = verify_folder(folder).faults
    assert fault.file == "s2.safetensors"
    assert "tensor 'c' is cut" in fault.what
    path.unlink()
    (fault,) = verify_folder(folder).faults
    assert fault == Fault("", fault.what)
    assert "s2.safetensors" in fault.what


def test_faults_of_every_kind_are_found_together(base2, capsys):
    flip(base2 / "tokenizer.json", 100)
    (base2 / "recipe.toml").unlink()
    (base2 / "later").write_text("")
    info = open_checkpoint(base2).tensors["lm_head.trellis"]
    flip(info.file, info.start)
    assert main(["verify", str(base2)]) == 1
    shown = capsys.readouterr().out
    assert "4 fault(s); 23 files and 2,068 tensors compared" in shown
    assert "- recipe.toml: listed in SHA256SUMS, but not there" in shown
    assert "- later: there, but not listed in SHA256SUMS" in shown
    assert "- tokenizer.json: sha256 " in shown
    assert f"- {info.file.name}: tensor 'lm_head.trellis' is damaged" in shown


@pytest.mark.parametrize("broken", ["missing", "cut"])
def test_what_a_broken_download_has_is_compared_all_the_same(base2, capsys, broken):
    infos = open_checkpoint(base2).tensors
    gone = [name for name, info in infos.items() if info.file.name == SHARD]
    assert len(gone) > 200
    if broken == "missing":
        (base2 / SHARD).unlink()
    else:
        raw = (base2 / SHARD).read_bytes()
        (base2 / SHARD).write_bytes(raw[: len(raw) // 2])
    flipped = infos["lm_head.trellis"]
    flip(flipped.file, flipped.start)
    assert main(["verify", str(base2)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert f"{len(infos) - len(gone):,} tensors compared" in shown[0]
    damaged = f"  - {flipped.file.name}: tensor 'lm_head.trellis' is damaged "
    assert sum(line.startswith(damaged) for line in shown) == 1
    lines = [line for line in shown if "has a digest, and is in no file" in line]
    if broken == "missing":
        (line,) = lines
        assert line.startswith(f"  - {DIGESTS_NAME}: ")
        assert f"{len(gone)} tensors: each has a digest" in line
        assert ", ".join(sorted(gone)[:10]) in line
        assert line.endswith(f", and {len(gone) - 10} more")
    else:
        assert lines == []
    assert len(shown) < 20
    assert not any("not compared" in line for line in shown)


def test_of_many_names_ten_are_shown(base2, capsys):
    for number in range(13):
        (base2 / f"new-{number:02}").write_text("")
    for info in (i for i in open_checkpoint(base2).tensors.values() if i.file.name == SHARD):
        flip(info.file, info.start)
    fault = next(fault for fault in verify_folder(base2).faults if fault.file == SHARD)
    assert len(fault.tensors) > 200
    assert fault.what.count("is damaged") == 10
    assert fault.what.endswith(f"\n    - and {len(fault.tensors) - 10} more")
    assert main(["verify", str(base2)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  - new-") for line in shown) == 10
    assert "  - and 3 more: there, but not listed in SHA256SUMS" in shown


def test_digests_of_an_incomplete_folder_are_those_of_the_tensors_that_are_there(tmp_path):
    folder = whole_folder(tmp_path)
    (folder / SUMS_NAME).unlink()
    (folder / "s2.safetensors").unlink()
    flip(folder / "s1.safetensors", -1)
    verdict = verify_folder(folder)
    assert verdict.num_tensors == 2
    assert {fault.tensors for fault in verdict.faults} == {(), ("b",)}
    told = {fault.file: fault.what for fault in verdict.faults}
    assert "tensor 'c' has a digest, and is in no file" in told[DIGESTS_NAME]
    assert verdict.unknown == (f"no {SUMS_NAME}: files beside the weights",)


def test_a_list_that_cannot_be_read_is_a_fault_and_the_rest_is_compared(base2):
    flip(base2 / SUMS_NAME, 64)  # a space
    verdict = verify_folder(base2)
    assert [fault.file for fault in verdict.faults] == [SUMS_NAME]
    assert verdict.num_tensors == 2068


@pytest.mark.parametrize("flag", ["--binary", "--text"])
def test_a_list_made_by_sha256sum_is_read(tmp_path, flag):
    folder = plain_folder(tmp_path)
    names = sorted(path.name for path in folder.iterdir())
    argv = ["sha256sum", flag, *(f"./{name}" for name in names)]
    sums = subprocess.run(argv, cwd=folder, check=True, capture_output=True).stdout
    (folder / SUMS_NAME).write_bytes(sums)
    verdict = verify_folder(folder)
    assert (verdict.num_files, verdict.faults) == (len(names), ())
    flip(folder / INDEX_NAME, -1)
    assert INDEX_NAME in {fault.file for fault in verify_folder(folder).faults}


def test_checksums_of_a_damaged_file_of_digests_do_not_hide_a_damaged_tensor(tmp_path):
    folder = whole_folder(tmp_path)
    flip(folder / DIGESTS_NAME, 5)
    flip(folder / "s1.safetensors", -1)
    assert {fault.file for fault in verify_folder(folder).faults} == {
        DIGESTS_NAME,
        "s1.safetensors",
    }


def test_no_folder_is_bad_luck_and_no_path_bad_usage(tmp_path, capsys):
    with pytest.raises(CheckpointError, match="no such folder"):
        verify_folder(tmp_path / "none")
    assert main(["verify", str(tmp_path / "none")]) == 1
    assert main(["verify"]) == 2
    assert main(["verify", ""]) == 2
    assert "the path is empty" in capsys.readouterr().err


def faults_of(folder):
    return {fault.file: fault.what for fault in verify_folder(folder).faults}


def not_there(path):
    path.symlink_to("nowhere")
    return "cannot be read: No such file or directory"


def round_and_round(path):
    path.symlink_to(path.name)
    return f"cannot be read: {os.strerror(errno.ELOOP)}"


def pipe(path):
    os.mkfifo(path)
    return "cannot be read: not a regular file"


@pytest.mark.parametrize("make", [not_there, round_and_round, pipe])
@pytest.mark.parametrize("has_sums", [True, False])
def test_what_is_no_file_is_a_fault(tmp_path, capsys, make, has_sums):
    folder = whole_folder(tmp_path)
    (folder / "notes").write_text("")
    write_sums(folder)
    if not has_sums:
        (folder / SUMS_NAME).unlink()
    (folder / "notes").unlink()
    told = make(folder / "notes")
    assert verify_folder(folder).faults == (Fault("notes", told),)
    assert main(["verify", str(folder)]) == 1
    assert f"  - notes: {told}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("make", [not_there, round_and_round, pipe])
@pytest.mark.parametrize("name", ["s1.safetensors", INDEX_NAME, DIGESTS_NAME, SUMS_NAME])
def test_no_part_of_a_checkpoint_is_waited_for(tmp_path, make, name):
    folder = whole_folder(tmp_path)
    (folder / name).unlink()
    make(folder / name)
    assert name in faults_of(folder)


def test_a_folder_that_cannot_be_listed_is_a_fault(tmp_path, monkeypatch):
    folder = whole_folder(tmp_path)
    for name in ("more", "other"):
        (folder / name).mkdir()
        (folder / name / "notes").write_text("")
    write_sums(folder)
    scandir, closed = os.scandir, folder / "more"

    def refuse(path):  # tests may run as root, for whom nothing is closed
        if os.fspath(path) == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert verify_folder(folder).faults == (Fault("more", "cannot be read: Permission denied"),)
    assert num_bytes_of(folder) > 0
    closed = folder
    with pytest.raises(CheckpointError, match="plain: cannot be read: Permission denied"):
        verify_folder(folder)
    assert main(["verify", str(folder)]) == 1


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    folder = whole_folder(tmp_path)

    def refuse(path, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(type(folder), "stat", refuse)
    for open_it in (verify_folder, open_checkpoint):
        with pytest.raises(CheckpointError, match="plain: cannot be read: Permission denied"):
            open_it(folder)


def spoil(path, how):
    """`path`, which is there and of no use."""
    text = path.read_text()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "mark":
        path.write_text("\ufeff" + text, "utf-8")
    elif how == "twice":
        path.write_text(text + text)
    else:
        path.write_text("")


@pytest.mark.parametrize("how", ["folder", "mark", "twice", "empty"])
def test_what_is_there_and_of_no_use_is_not_said_to_be_missing(tmp_path, how):
    folder = whole_folder(tmp_path)
    spoil(folder / SUMS_NAME, how)
    verdict = verify_folder(folder)
    assert (verdict.num_files, verdict.num_tensors) == (0, 3)
    assert [fault.file for fault in verdict.faults] == [SUMS_NAME]
    assert verdict.unknown == (f"{SUMS_NAME} could not be used: files beside the weights",)
    spoil(folder / DIGESTS_NAME, how)
    both = f"{SUMS_NAME} could not be used and {DIGESTS_NAME} could not be used: "
    assert verify_folder(folder).unknown[1].startswith(both + "the bytes of 3 of 3 tensors")
    remove(folder / SUMS_NAME)
    both = f"no {SUMS_NAME} and {DIGESTS_NAME} could not be used: "
    assert verify_folder(folder).unknown[1].startswith(both + "the bytes of 3 of 3 tensors")


def test_digests_over_the_limit_could_not_be_used(tmp_path, monkeypatch):
    folder = whole_folder(tmp_path)
    size = (folder / DIGESTS_NAME).stat().st_size
    assert size > max((folder / name).stat().st_size for name in ("config.json", INDEX_NAME))
    monkeypatch.setattr(strict_json, "MAX_JSON_BYTES", size - 1)
    verdict = verify_folder(folder)
    (fault,) = verdict.faults
    assert fault.what.endswith(f"{DIGESTS_NAME}: {size} bytes long, the limit is {size - 1}")
    told = f"{DIGESTS_NAME} could not be used: which tensors of a file are damaged"
    assert verdict.unknown == (told,)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_bad_header_is_the_only_fault_of_its_tensors(tmp_path, has_index):
    folder = whole_folder(tmp_path)
    flip(folder / "s1.safetensors", 8)  # the "{" of its header
    if has_index:
        (fault,) = verify_folder(folder).faults
        assert (fault.file, fault.tensors) == ("s1.safetensors", ())
        (folder / "s2.safetensors").unlink()
        told = faults_of(folder)[DIGESTS_NAME]
        assert told.endswith("tensor 'c' has a digest, and is in no file")
    else:
        (folder / INDEX_NAME).unlink()
        assert DIGESTS_NAME not in faults_of(folder)
