"""Receipts: what is written, and that only what has exactly their form is read."""

import hashlib
import json
from pathlib import Path

import pytest

from emberbox.errors import EnvironmentProblem, MeasureError
from emberbox.measure import receipt as receipt_module
from emberbox.measure.receipt import load, run_of, save
from emberbox.measure.verify import verify
from tests.helpers.receipts import (
    edit,
    measured,
    small_panel,
    small_windows,
    write_receipt,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_receipt(tmp_path_factory.mktemp("good") / "small.json").path.read_bytes()


@pytest.fixture
def path(tmp_path, good):
    found = tmp_path / "small.json"
    found.write_bytes(good)
    return found


def refusal(path):
    with pytest.raises(MeasureError) as caught:
        load(path)
    assert str(path) in caught.value.message
    return caught.value.message


def test_the_file_is_canonical_json_and_its_hash_is_of_the_rest(path):
    raw = path.read_bytes()
    document = json.loads(raw)
    canonical = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": False}
    assert raw == json.dumps(document, **canonical).encode() + b"\n"
    claimed = document.pop("sha256")
    assert claimed == hashlib.sha256(json.dumps(document, **canonical).encode()).hexdigest()


def test_it_says_what_was_measured(path):
    receipt, panel = load(path), small_panel()
    assert receipt["panel"]["name"] == "small"
    assert receipt["panel"]["sha256"] == panel.sha256
    first = receipt["panel"]["windows"][0]
    assert first["positions"] == len(panel.windows[0].token_ids) - 1
    assert first["token_sha256"] == panel.windows[0].token_sha256()
    assert receipt["lane"] == "weights"
    assert receipt["direction"] == "reference||candidate"
    assert receipt["device"]["kind"] == "cpu"
    assert len(receipt["emberbox"]["commit"]) in (0, 40)
    assert receipt["results"]["positions"] == panel.num_positions
    assert receipt["metric_version"] == 1


def test_the_record_lies_beside_it(tmp_path):
    receipt = write_receipt(tmp_path / "new" / "small.json")
    raw = (tmp_path / "new" / "small.record.xz").read_bytes()
    assert receipt["record"] == {
        "file": "small.record.xz",
        "bytes": len(raw),
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "small.json",
        "small.record.xz",
    ]
    assert load(receipt.path) == receipt
    assert list(receipt.read_record()) == [name for name, _ in receipt.windows]


def test_two_runs_are_told_apart(tmp_path):
    panel = small_panel()
    first, second = small_windows(panel, 0.5), small_windows(panel, 0.5, seed=9)
    runs = [run_of(first), run_of(second)]
    receipt = save(tmp_path / "a.json", measured(panel, first, runs=runs), first)
    assert receipt["runs"]["count"] == 2
    assert len(set(receipt["runs"]["record_sha256"])) == 2
    assert receipt["runs"]["kl"][0] == receipt["results"]["kl"]["value"]
    assert receipt["runs"]["kl_spread"] == abs(runs[0].kl - runs[1].kl) > 0


def test_a_receipt_needs_its_suffix_and_a_folder_that_can_be_written(tmp_path):
    panel = small_panel()
    windows = small_windows(panel, 0.5)
    with pytest.raises(MeasureError, match=r"ends in \.json"):
        save(tmp_path / "a.txt", measured(panel, windows), windows)
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="file: cannot write"):
        save(tmp_path / "file" / "a.json", measured(panel, windows), windows)


def test_files_that_end_in_tmp_are_not_in_the_way(tmp_path):
    (tmp_path / "a.json.tmp").write_text("precious")
    (tmp_path / "a.record.xz.tmp").mkdir()
    write_receipt(tmp_path / "a.json")
    assert (tmp_path / "a.json.tmp").read_text() == "precious"
    names = ["a.json", "a.json.tmp", "a.record.xz", "a.record.xz.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_what_cannot_be_replaced_leaves_nothing_behind(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        write_receipt(tmp_path / "a.json")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("there", ["a.json", "a.record.xz"])
def test_a_file_that_came_meanwhile_is_kept(tmp_path, there):
    panel = small_panel()
    windows = small_windows(panel, 0.5)
    (tmp_path / there).write_text("precious")
    with pytest.raises(MeasureError, match=f"{there}: is there already"):
        save(tmp_path / "a.json", measured(panel, windows), windows)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {there: "precious"}


@pytest.mark.parametrize("call", range(12))
def test_however_far_replacing_comes_a_receipt_has_its_own_record(tmp_path, monkeypatch, call):
    """Ended before each change of the folder in turn, as by a kill: nothing is tidied up."""
    path, calls = write_receipt(tmp_path / "a.json", 0.5, 1).path, []

    def counted(original):
        def change(*arguments, **named):
            calls.append(original)
            if len(calls) > call:
                raise KeyboardInterrupt
            return original(*arguments, **named)

        return change

    for place, name in ((receipt_module, "write_file"), (Path, "unlink"), (Path, "replace")):
        monkeypatch.setattr(place, name, counted(getattr(place, name)))
    monkeypatch.setattr(receipt_module, "remove", lambda _: None)
    try:
        write_receipt(path, 0.3, 2)
    except KeyboardInterrupt:
        assert call < 5
    else:
        assert call >= 5  # two files, the old one away, two names
    monkeypatch.undo()
    if path.exists():
        assert verify(path) == []
    else:
        assert call in (3, 4)


def test_facts_of_the_wrong_form_are_not_written(tmp_path):
    panel = small_panel()
    windows = small_windows(panel, 0.5)
    with pytest.raises(MeasureError, match="lane is 'both', expected 'weights' or 'served'"):
        save(tmp_path / "a.json", measured(panel, windows, lane="both"), windows)
    assert list(tmp_path.iterdir()) == []


def at(*keys, put):
    """A change of one place of a document."""

    def change(document):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = put

    return change


def without(*keys):
    def change(document):
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return change


CHANGES = {
    "other schema": (
        at("schema", put="emberbox.fidelity.v2"),
        "schema is 'emberbox.fidelity.v2', expected 'emberbox.fidelity.v1'",
    ),
    "unknown key": (at("grade", put=1), "grade is unknown"),
    "unknown key inside": (at("results", "windows", 2, "mood", put=1), "results.windows[2].mood"),
    "key to frighten a terminal": (at("\x1b[2J", put=1), r"'\x1b[2J' is unknown"),
    "missing key": (without("runs"), "runs is missing"),
    "missing key inside": (without("reference", "files"), "reference.files is missing"),
    "text for a number": (
        at("results", "kl", "value", put="0.1"),
        "results.kl.value is '0.1', expected a number that is finite",
    ),
    "true for a number": (at("results", "positions", put=True), "results.positions is True"),
    "float for a count": (at("runs", "count", put=2.0), "runs.count is 2.0, expected a whole"),
    "negative count": (at("record", "bytes", put=-1), "record.bytes is -1"),
    "huge number": (at("results", "kl", "value", put=10**400), "results.kl.value is 1000"),
    "share above 1": (at("results", "windows", 0, "top1", put=1.5), "from 0 to 1"),
    "one bound": (
        at("results", "kl", "interval", put=[0.1]),
        "results.kl.interval has 1 entries, expected 2 to 2",
    ),
    "list for an object": (at("panel", put=[]), "panel is [], expected an object"),
    "no windows": (at("panel", "windows", put=[]), "panel.windows has 0 entries"),
    "short hash": (at("sha256", put="ab"), "sha256 is 'ab', expected 64 hex digits"),
    "commit": (at("emberbox", "commit", put="main"), "emberbox.commit is 'main'"),
    "other lane": (at("lane", put="both"), "lane is 'both'"),
    "other direction": (at("direction", put="candidate||reference"), "direction is"),
    "record elsewhere": (
        at("record", "file", put="../small.record.xz"),
        "record.file is '../small.record.xz', expected a plain file name",
    ),
    "hidden record": (at("record", "file", put=".record.xz"), "record.file is"),
    "control characters": (at("candidate", "name", put="a\x1b[31m"), "candidate.name is"),
    "control characters of a device": (
        at("device", "name", put="a\x1b[31m"),
        "device.name is 'a\\x1b[31m', expected a line",
    ),
    "control characters inside": (at("device", "links", put=["a\x1b[31m"]), "device.links[0] is"),
    "lone surrogate in a name": (at("reference", "files", "\ud800", put="ab" * 32), "surrogate"),
    "no spread": (at("results", "kl_spread", put=None), "results.kl_spread is None"),
    "turned text": (at("command", put="emberbox \u202e"), "command is"),
    "lone surrogate": (at("settings", "dtype", put="\ud800"), "unpaired surrogate"),
    "endless text": (at("settings", "dtype", put="x" * 20_001), "settings.dtype has 20001 char"),
    "too deep": (
        at("candidate", "about", put={"a": [[[[[[[[1]]]]]]]]}),
        "nested too deeply",
    ),
    "an id twice": (
        at("panel", "windows", 3, "id", put="w01"),
        "panel.windows[3].id is 'w01', which stands there twice",
    ),
    "more positions than memory": (
        at("panel", "windows", 0, "positions", put=1 << 22),
        "panel.windows have 4194",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_form_is_refused_and_the_place_named(path, name):
    change, said = CHANGES[name]
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))
    assert said in refusal(path)


def test_every_problem_is_named_at_once(path):
    edit(path, at("lane", put="both"), reseal=False)
    edit(path, without("runs"), reseal=False)
    edit(path, at("panel", "name", put=7), reseal=False)
    message = refusal(path)
    assert "3 problem(s)" in message
    assert all(place in message for place in ("lane is", "runs is missing", "panel.name is 7"))


def test_a_flood_of_problems_is_cut(path):
    edit(path, at("op_table", put={f"op{i}": i for i in range(5000)}), reseal=False)
    message = refusal(path)
    assert "5000 problem(s)" in message
    assert "and 4960 more" in message


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "does not start with"),
        (b"[]", "does not start with"),
        (b'{"schema"', "not JSON"),
        (b'{"lane": "weights", "lane": "served"}', "'lane' stands twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
    ids=["empty", "list", "cut", "duplicate", "nan", "infinity", "latin", "deep"],
)
def test_what_is_no_json_is_refused(path, raw, said):
    path.write_bytes(raw)
    assert said in refusal(path)


def test_a_number_too_large_for_a_float_is_refused(path, good):
    value = json.dumps(json.loads(good)["results"]["kl"]["value"]).encode()
    path.write_bytes(good.replace(b'"value":' + value, b'"value":1e999'))
    assert "results.kl.value is inf" in refusal(path)


def test_a_huge_file_is_not_read(path):
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # takes no space
    assert "larger than" in refusal(path)


def test_a_receipt_that_is_not_there_is_named(tmp_path):
    assert "no such file" in refusal(tmp_path / "none.json")
    assert "not a file" in refusal(tmp_path)
