"""The folder that a conversion writes: killed anywhere, damaged anywhere, resumed bit for bit."""

import hashlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
from collections import Counter

import numpy as np
import pytest

from emberbox.compress.journal import JOURNAL_NAME, Job
from emberbox.compress.output import WORK_NAME, Output
from emberbox.errors import (
    CheckpointError,
    DuplicateName,
    EnvironmentProblem,
    SettingsError,
    WrongSize,
)
from emberbox.store import read_back
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.checksums import verify_checksums
from emberbox.store.verification import verify_folder
from tests.helpers.crash import Operations, in_child, start_child

UNITS = ("embed", "layer-0", "layer-1", "layer-2", "head")
NO_STATE = ("head",)
CONFIG = {"model_type": "toy", "name": "ä"}
CARD = "# toy\n"
STATE_BYTES = 100


def _tensors(unit, activations):
    """Two or three tensors that depend on what came before: a wrong state shows in the weights."""
    for number in range(2 + len(unit) % 2):
        seed = hashlib.sha256(activations + f"{unit}{number}".encode()).digest()
        yield f"{unit}.{number}", "U8", (32,), seed
    yield f"{unit}.scale", "F32", (2,), np.full(2, len(unit), dtype=np.float32)


def _advance(activations, unit):
    return hashlib.sha256(activations + unit.encode()).digest()


def _before():
    """What each unit is made from."""
    activations, before = b"", {}
    for unit in UNITS:
        before[unit] = activations
        activations = _advance(activations, unit)
    return before


UNIT_BYTES = {unit: 32 * (2 + len(unit) % 2) + 8 for unit in UNITS}


def _job(**changes):
    arguments = {
        "plan_digest": "d1",
        "unit_bytes": UNIT_BYTES,
        "max_shard_bytes": 80,
        "state_bytes": STATE_BYTES,
        "about": {"recipe": "base2", "source": "toy"},
    }
    return Job(**{**arguments, **changes})


def _open(folder, resume=True, job=None, **options):
    return Output.open(
        folder, job or _job(), source=folder.parent / "source", resume=resume, **options
    )


def _convert(folder, computed=None, units=UNITS, finish=True):
    """What the pipeline does: go on from the last state, or from the start if there is none."""
    with _open(folder) as output:
        for place, unit in enumerate(units):
            if unit in output.done:
                continue
            if computed is not None:
                _append(computed, unit)
            kept = output.state(UNITS[place - 1]) if place else None
            if kept:
                with kept.open("rb") as file:
                    activations = file.read()
            else:
                activations = b""
                for earlier in UNITS[:place]:
                    activations = _advance(activations, earlier)
            with output.unit(unit) as writer:
                for tensor in _tensors(unit, activations):
                    writer.add(*tensor)
                if unit not in NO_STATE:
                    state = _advance(activations, unit)
                    writer.save_state([state[:5], state[5:]])
        if finish:
            output.finish(CONFIG, {"recipe.toml": b"x = 1\n"}, CARD)


def _append(path, line):
    """Past the counted operations."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def _contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "dst"
    _convert(folder)
    return _contents(folder)


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch):
    """A killed process loses nothing that it wrote; waiting for the disk would only take time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None, raising=False)


def _run_until(folder, computed, die_at, torn):
    def run():
        Operations(die_at, torn)
        _convert(folder, computed)

    return in_child(run)


def _check_interrupted(folder, expected):
    """Not loadable; or, once the index is there, complete to the last byte."""
    try:
        open_checkpoint(folder)
    except CheckpointError:
        return False
    found = {
        name: data
        for name, data in _contents(folder).items()
        if not name.startswith((WORK_NAME, JOURNAL_NAME))
    }
    assert found == expected
    return True


def _check_resumed(folder, computed, expected, crashes):
    is_complete = _check_interrupted(folder, expected)
    if not (is_complete and not (folder / JOURNAL_NAME).exists()):
        _convert(folder, computed)
    assert _contents(folder) == expected
    assert {path.name for path in folder.iterdir()} == expected.keys()
    counts = Counter(computed.read_text().split())
    assert counts.keys() == set(UNITS)
    assert counts.total() <= len(UNITS) + crashes


def _operations(tmp_path):
    def run():
        operations = Operations()
        _convert(tmp_path / "counted")
        _append(tmp_path / "kinds", json.dumps(operations.kinds))

    assert in_child(run) == 0
    return json.loads((tmp_path / "kinds").read_text())


@pytest.mark.parametrize("torn", [False, True], ids=["before", "torn"])
def test_killed_at_every_file_operation_it_goes_on_bit_for_bit(tmp_path, expected, torn):
    kinds = _operations(tmp_path)
    assert {"open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir"} <= set(kinds)
    for die_at, kind in enumerate(kinds):
        if torn and kind != "write":
            continue
        folder, computed = tmp_path / "dst", tmp_path / "computed"
        assert _run_until(folder, computed, die_at, torn) == -9
        _check_resumed(folder, computed, expected, crashes=1)
        shutil.rmtree(folder)
        computed.unlink()


def test_killed_again_and_again_it_goes_on_bit_for_bit(tmp_path, expected):
    count = len(_operations(tmp_path))
    choose = random.Random(5)
    for _ in range(25):
        folder, computed = tmp_path / "dst", tmp_path / "computed"
        crashes = 0
        for _ in range(4):
            died = _run_until(folder, computed, choose.randrange(count), choose.random() < 0.5)
            crashes += 1
            if died != -9 or _check_interrupted(folder, expected):
                break
        if (folder / JOURNAL_NAME).exists() or died == -9:
            _check_resumed(folder, computed, expected, crashes)
        assert _contents(folder) == expected
        shutil.rmtree(folder)
        computed.unlink()


def test_a_finished_folder_is_a_checkpoint(tmp_path, expected):
    folder = tmp_path / "dst"
    _convert(folder)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == CONFIG
    assert checkpoint.num_bytes == sum(UNIT_BYTES.values())
    for unit in UNITS:
        infos = [info for name, info in checkpoint.tensors.items() if name.startswith(unit)]
        assert sum(info.num_bytes for info in infos) == UNIT_BYTES[unit]
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, 10)]
    where = [checkpoint.tensors[f"{unit}.0"].file.name for unit in UNITS]
    assert where == sorted(where)  # shards in the order of the job
    assert checkpoint.digests == {
        name: hashlib.sha256(bytes(data)).hexdigest()[:32]
        for unit, activations in _before().items()
        for name, _, _, data in _tensors(unit, activations)
    }
    assert verify_folder(folder).faults == ()
    assert verify_checksums(folder) == len(expected) - 1
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


def test_the_order_in_which_units_are_done_does_not_show(tmp_path, expected):
    before = _before()
    with _open(tmp_path / "dst") as output:
        for unit in reversed(UNITS):
            with output.unit(unit) as writer:
                for tensor in _tensors(unit, before[unit]):
                    writer.add(*tensor)
        output.finish(CONFIG, {"recipe.toml": b"x = 1\n"}, CARD)
    assert _contents(tmp_path / "dst") == expected


# -- damage ---------------------------------------------------------------------------------------


@pytest.fixture
def half_done(tmp_path):
    """Three of five units."""
    _convert(tmp_path / "dst", units=UNITS[:3], finish=False)
    return tmp_path / "dst"


def _flip(path, position):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def _resumed(folder, tmp_path, expected):
    """Finish; which units were computed."""
    _convert(folder, tmp_path / "computed")
    assert _contents(folder) == expected
    return (tmp_path / "computed").read_text().split()


@pytest.mark.parametrize("keep", [0, 1, 40, -1, -2])
def test_a_torn_last_line_costs_one_unit(half_done, tmp_path, expected, keep):
    journal = half_done / JOURNAL_NAME
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:keep])
    assert _resumed(half_done, tmp_path, expected) == list(UNITS[2:])


@pytest.mark.parametrize("position", [0, 63, 64, 65, 90, -1])
def test_a_damaged_line_costs_its_unit_and_those_after_it(half_done, tmp_path, expected, position):
    journal = half_done / JOURNAL_NAME
    lines = journal.read_bytes().splitlines(keepends=True)
    start = len(lines[0]) + len(lines[1])
    _flip(journal, start + position % len(lines[2]))
    assert _resumed(half_done, tmp_path, expected) == list(UNITS[1:])


def test_nothing_after_a_damaged_line_comes_back(half_done):
    journal = half_done / JOURNAL_NAME
    lines = journal.read_bytes().splitlines(keepends=True)
    _flip(journal, len(lines[0]) + len(lines[1]))
    with _open(half_done) as output, output.unit(UNITS[1]) as writer:
        for tensor in _tensors(UNITS[1], _advance(b"", UNITS[0])):
            writer.add(*tensor)
        writer.save_state([_advance(_advance(b"", UNITS[0]), UNITS[1])])
    assert journal.read_bytes().splitlines(keepends=True) == lines[:3]


def test_a_unit_that_was_done_again_has_the_newest_state(half_done):
    shutil.rmtree(half_done / WORK_NAME / "units" / UNITS[0])
    with _open(half_done) as output, output.unit(UNITS[0]) as writer:
        for tensor in _tensors(UNITS[0], b""):
            writer.add(*tensor)
        writer.save_state([b"again"])
    with _open(half_done) as output:
        assert output.state(UNITS[0]).read_bytes() == b"again"
        assert output.state(UNITS[2]) is None


def test_what_a_crash_left_half_way_is_removed(half_done):
    work = half_done / WORK_NAME
    before = _contents(half_done)
    for folder in ("under-way", "units/head"):
        (work / folder).mkdir()
        (work / folder / "model.safetensors").write_text("half")
    for file in ("state", "states/head"):
        (work / file).write_text("half")
    _open(half_done).close()
    assert _contents(half_done) == before


def test_a_damaged_first_line_is_refused(half_done):
    _flip(half_done / JOURNAL_NAME, 70)
    with pytest.raises(CheckpointError, match="damaged"):
        _open(half_done)


def test_a_journal_of_paths_is_refused(half_done):
    with (half_done / JOURNAL_NAME).open("ab") as file:
        text = b'{"finish":{"shards":{},"others":["../victim"]}}'
        file.write(hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n")
    (half_done.parent / "victim").write_text("")
    with pytest.raises(CheckpointError, match="path"):
        _open(half_done)
    assert (half_done.parent / "victim").exists()


@pytest.mark.parametrize("unit", UNITS[:3])
@pytest.mark.parametrize("damage", ["data", "header", "cut", "longer", "gone"])
def test_a_damaged_shard_of_a_done_unit_is_written_again(
    half_done, tmp_path, expected, unit, damage, caplog
):
    shard = sorted((half_done / WORK_NAME / "units" / unit).glob("*.safetensors"))[-1]
    before = shard.stat()
    raw = shard.read_bytes()
    if damage == "gone":
        shard.unlink()
    else:
        changed = {"cut": raw[:-1], "longer": raw + b"\0"}.get(damage)
        position = {"header": 20}.get(damage, -1)
        shard.write_bytes(changed if changed else raw)
        if not changed:
            _flip(shard, position)
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    with caplog.at_level(logging.WARNING):
        computed = _resumed(half_done, tmp_path, expected)
    assert computed == [unit, *UNITS[3:]]
    assert f"unit {unit} is damaged" in caplog.text


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_state_is_computed_again(half_done, tmp_path, expected, damage, caplog):
    state = half_done / WORK_NAME / "states" / UNITS[2]
    if damage == "flip":
        _flip(state, 3)
    elif damage == "cut":
        state.write_bytes(state.read_bytes()[:-1])
    else:
        state.unlink()
    with caplog.at_level(logging.WARNING):
        assert _resumed(half_done, tmp_path, expected) == list(UNITS[3:])
    assert f"the state after unit {UNITS[2]} is damaged" in caplog.text


def test_what_reads_back_differently_is_not_kept(tmp_path, monkeypatch):
    with _open(tmp_path / "dst") as output:
        with pytest.raises(CheckpointError, match=r"tensor 'embed\.1' reads back"):  # noqa: SIM117
            with output.unit("embed") as writer:
                for tensor in _tensors("embed", b""):
                    writer.add(*tensor)
                original = read_back.read_header

                def spoiled(path):
                    for name, info in original(path).items():
                        if name == "embed.1":
                            _flip(path, info.start)
                    return original(path)

                monkeypatch.setattr(read_back, "read_header", spoiled)
        monkeypatch.undo()
        assert output.done == frozenset()
        _write(output, "embed")  # and may be tried again
        assert output.done == {"embed"}


def _write(output, unit, tensors=None):
    with output.unit(unit) as writer:
        for tensor in tensors or _tensors(unit, b""):
            writer.add(*tensor)


# -- states and progress --------------------------------------------------------------------------


def test_only_the_newest_state_is_kept(tmp_path):
    with _open(tmp_path / "dst") as output:
        for place, unit in enumerate(UNITS[:3]):
            with output.unit(unit) as writer:
                for tensor in _tensors(unit, b""):
                    writer.add(*tensor)
                if place != 2:
                    writer.save_state([b"first try"])
                    writer.save_state(np.full(3, place, np.uint8) for _ in range(2))
        assert output.state(UNITS[0]) is None
        assert output.state(UNITS[1]).read_bytes() == b"\1" * 6
        assert output.state(UNITS[2]) is None
        assert output.state("head") is None
        states = tmp_path / "dst" / WORK_NAME / "states"
        assert [path.name for path in states.iterdir()] == [UNITS[1]]


def test_progress_of_the_verification_ends_at_all_bytes(half_done):
    told = []
    _open(half_done, on_progress=lambda done, total: told.append((done, total))).close()
    files = half_done.glob(f"{WORK_NAME}/units/*/*.safetensors")
    total = sum(path.stat().st_size for path in files)
    assert told[-1] == (total, total)
    assert told == sorted(told)


# -- what is refused ------------------------------------------------------------------------------


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    folder = tmp_path / "dst"
    holding, release = os.pipe()

    def hold():
        with _open(folder):
            os.write(release, b"x")
            signal.pause()

    pid = start_child(hold)
    os.read(holding, 1)
    try:
        with pytest.raises(EnvironmentProblem, match="another process"):
            _open(folder)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(holding)
        os.close(release)
    _open(folder).close()


def test_leaving_releases_the_folder(tmp_path):
    with _open(tmp_path / "dst"), pytest.raises(EnvironmentProblem, match="another process"):
        _open(tmp_path / "dst")
    _open(tmp_path / "dst").close()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"plan_digest": "d2", "about": {"recipe": "base3"}}, ["recipe: base2 there, base3 asked"]),
        ({"plan_digest": "d2"}, ["plan_digest: d1 there, d2"]),
        ({"max_shard_bytes": 81}, ["max_shard_bytes: 80 there, 81"]),
        ({"unit_bytes": {**UNIT_BYTES, "extra": 1}}, ["1 units, such as extra"]),
        ({"unit_bytes": dict(reversed(UNIT_BYTES.items()))}, ["order of the units"]),
    ],
)
def test_another_plan_is_refused_with_what_differs(half_done, changes, told):
    before = _contents(half_done)
    with pytest.raises(CheckpointError) as caught:
        _open(half_done, job=_job(**changes))
    for text in told:
        assert text in str(caught.value)
    assert _contents(half_done) == before


def test_a_beginning_is_not_resumed_unasked(half_done):
    with pytest.raises(CheckpointError, match="resume"):
        _open(half_done, resume=False)


def test_what_is_not_needed_for_equal_bytes_may_change(half_done):
    _open(half_done, job=_job(about={"source": "moved"}, state_bytes=1)).close()


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_other_files_is_refused(tmp_path, resume):
    (tmp_path / "dst").mkdir()
    for number in range(7):
        (tmp_path / "dst" / f"note{number}").write_text("")
    with pytest.raises(CheckpointError, match="note0, note1, note2, note3, note4 and 2 more"):
        _open(tmp_path / "dst", resume=resume)
    assert len(list((tmp_path / "dst").iterdir())) == 7


def test_files_that_came_later_are_not_overwritten(half_done, tmp_path, expected):
    (half_done / "README.md").write_text("mine")
    with pytest.raises(CheckpointError, match=r"README\.md"):
        _open(half_done)
    (half_done / "README.md").unlink()
    with _open(half_done) as output:
        for unit in UNITS[3:]:
            _write(output, unit)
        (half_done / "stray.safetensors").write_text("")
        with pytest.raises(CheckpointError, match="stray"):
            output.finish(CONFIG, {}, CARD)
    assert not (half_done / "config.json").exists()


def test_the_source_is_not_written_to(tmp_path):
    (tmp_path / "source").mkdir()
    with pytest.raises(SettingsError, match="lies inside"):
        Output.open(
            tmp_path / "source" / "a" / "b", _job(), source=tmp_path / "source", resume=True
        )
    assert list((tmp_path / "source").iterdir()) == []


def test_a_unit_is_what_the_plan_says(tmp_path):
    with _open(tmp_path / "dst") as output:
        with pytest.raises(WrongSize, match="unit 'embed' has 32 bytes"):
            _write(output, "embed", [("a", "U8", (32,), bytes(32))])
        with pytest.raises(ValueError, match="not in the job"):
            _write(output, "other")
        _write(output, "embed")
        with pytest.raises(ValueError, match="done"):
            _write(output, "embed")
        with pytest.raises(DuplicateName, match="unit embed"):
            _write(output, "head", _tensors("embed", b""))
        with pytest.raises(ValueError, match="not done"):
            output.finish(CONFIG, {}, CARD)
    with _open(tmp_path / "dst") as output, pytest.raises(DuplicateName, match="unit embed"):
        _write(output, "head", _tensors("embed", b""))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "README.md",
        "SHA256SUMS",
        "tensors.sha256.json",
        "a/b",
        "..",
        ".hidden",
        "x.safetensors",
        "a\nb",
        "",
    ],
)
def test_extra_files_take_no_name_of_ours(tmp_path, name):
    with _open(tmp_path / "dst", job=_job(unit_bytes={"embed": UNIT_BYTES["embed"]})) as output:
        _write(output, "embed")
        with pytest.raises(ValueError, match="taken"):
            output.finish(CONFIG, {name: b""}, CARD)


def test_extra_files_are_copied(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    extra = {"tokenizer.json": tmp_path / "tokenizer.json", "gone": tmp_path / "gone"}
    folder = tmp_path / "dst"
    with _open(folder, job=_job(unit_bytes={"embed": UNIT_BYTES["embed"]})) as output:
        _write(output, "embed")
        with pytest.raises(EnvironmentProblem, match="gone: cannot be read"):
            output.finish(CONFIG, extra, CARD)
    with _open(folder, job=_job(unit_bytes={"embed": UNIT_BYTES["embed"]})) as output:
        output.finish(CONFIG, {"tokenizer.json": extra["tokenizer.json"]}, CARD)
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert verify_checksums(folder) == 7


@pytest.mark.parametrize("at", range(12))
def test_a_full_disk_is_reported_and_the_unit_may_be_tried_again(tmp_path, monkeypatch, at):
    with _open(tmp_path / "dst") as output:
        calls = []

        def full(descriptor):
            calls.append(descriptor)
            if len(calls) == at + 1:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        try:
            with output.unit("layer-0") as writer:
                for tensor in _tensors("layer-0", b""):
                    writer.add(*tensor)
                writer.save_state([b"state"])
        except EnvironmentProblem as problem:
            assert "No space left" in str(problem)
            assert "layer-0" not in output.done
            _write(output, "layer-0")
        else:
            assert at >= len(calls)
        monkeypatch.undo()
    with _open(tmp_path / "dst") as output:
        assert output.done == {"layer-0"}


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", ".a", "a b"])
def test_unit_names_are_file_names(name):
    with pytest.raises(ValueError, match="units"):
        _job(unit_bytes={name: 1})
