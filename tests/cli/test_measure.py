"""The verb `measure`, as people and programs call it."""

import json
import shlex
from pathlib import Path

import pytest

from emberbox.cli.main import main
from emberbox.measure.fidelity import measure_fidelity
from emberbox.measure.receipt import file_bytes
from emberbox.measure.verify import verify
from tests.measure.tiny_pair import write_pair, write_panel


@pytest.fixture
def world(tmp_path):
    """Arguments of a measurement that works, and where its receipt goes."""
    reference, candidate = write_pair(tmp_path)
    out = tmp_path / "out.json"
    argv = ["measure", "fidelity", str(reference), str(candidate), "--device", "cpu"]
    return [*argv, "--panel", str(write_panel(tmp_path)), "-o", str(out)], out


def test_it_writes_a_receipt_that_verifies_and_shows_it(world, capsys):
    argv, out = world
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "reference||candidate" in shown
    assert "2, equal to the last bit" in shown
    assert main(["receipt", "verify", str(out)]) == 0
    capsys.readouterr()
    assert main(["receipt", "show", str(out)]) == 0
    assert capsys.readouterr().out == shown
    assert out.with_name("out.record.xz").exists()


@pytest.mark.parametrize("place", ["after", "before"])
def test_json_is_the_receipt(world, capsys, place):
    argv, out = world
    argv = [*argv, "--json"] if place == "after" else ["measure", "--json", *argv[1:]]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    assert document["lane"] == "weights"
    assert document["runs"]["count"] == 2
    assert document["candidate"]["name"] == "candidate"
    assert 0 < document["results"]["kl"]["value"] < 10
    assert document["results"]["positions"] == 1 + 66 + 129


@pytest.mark.parametrize(
    "more",
    [[], ["--lane", "served", "--runs", "1", "--chunk", "64"]],
    ids=["defaults", "all flags"],
)
def test_the_command_in_the_receipt_measures_the_same_again(world, capsys, more):
    argv, _ = world
    assert main([*argv, *more, "--json", "--log-level", "error"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert shlex.split(first["command"])[0] == "emberbox"
    assert set(more) <= set(shlex.split(first["command"]))
    assert main([*shlex.split(first["command"])[1:], "--force", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == first


def test_a_kept_capture_gives_the_same_receipt(world, tmp_path, capsys):
    argv, _ = world
    kept = ["--capture", str(tmp_path / "kept"), "--json"]
    found = []
    for more in (["--json"], kept, kept):
        assert main([*argv, "--force", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] == found[2]
    assert len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        (["--lane", "both"], 2, "lane: 'both'"),
        (["--runs", "0"], 2, "runs: 0"),
        (["--panel", "nano-26"], 1, "there is no panel 'nano-26'"),
        (["--device", "gpu"], 1, "'gpu' is not a device"),
        (["-o", "/no/such/out.json"], 1, "there is no folder /no/such"),
        (["-o", "out.txt"], 1, "not the name of a receipt"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_is_written(world, capsys, changed, code, said):
    argv, out = world
    assert main([*argv, *changed]) == code
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_a_file_that_is_no_receipt_is_not_overwritten(world, capsys):
    argv, out = world
    out.write_text('{"mine": true}')
    assert main([*argv, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "MeasureError"
    assert "is there already" in error["message"]
    assert out.read_text() == '{"mine": true}'


def test_a_receipt_that_is_there_is_replaced_only_by_force(world, capsys):
    argv, out = world
    record = out.with_name("out.record.xz")
    assert main([*argv, "--runs", "1"]) == 0
    before = out.read_bytes(), record.read_bytes()
    capsys.readouterr()
    assert main(argv) == 1
    said = capsys.readouterr().err
    assert f"{out}: is there already" in said
    assert "--force" in said
    assert (out.read_bytes(), record.read_bytes()) == before
    assert main([*argv, "--force"]) == 0
    assert json.loads(out.read_text())["runs"]["count"] == 2
    assert "--force" not in json.loads(out.read_text())["command"]
    assert main(["receipt", "verify", str(out)]) == 0


@pytest.mark.parametrize("flag", ["--output", "--capture"])
def test_an_empty_path_is_not_this_folder(world, capsys, flag):
    argv, _ = world
    assert main([*argv, flag, ""]) == 2
    assert "the path is empty" in capsys.readouterr().err


@pytest.mark.parametrize("output", [".", "/"])
def test_a_folder_is_not_the_name_of_a_receipt(world, capsys, output):
    argv, _ = world
    assert main([*argv, "-o", output]) == 1
    assert "not the name of a receipt" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["measure"], ["measure", "speed"], ["measure", "fidelity", "a"]])
def test_bad_usage(argv, capsys):
    assert main(argv) == 2
    assert "usage: emberbox measure" in capsys.readouterr().err


def test_help_has_an_example(capsys):
    for argv in (["measure", "--help"], ["measure", "fidelity", "--help"]):
        assert main(argv) == 0
        assert "emberbox measure fidelity models/ember-nano" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_figures_are_printed_where_the_receipt_cannot_be_kept(world, monkeypatch, capsys, more):
    argv, out = world
    assert main([*argv, "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    record = out.with_name("out.record.xz")
    kept = record.read_bytes()
    out.unlink()
    record.unlink()

    def measure(*arguments):
        found = measure_fidelity(*arguments)
        out.write_text("of another")
        return found

    monkeypatch.setattr("emberbox.measure.fidelity.measure_fidelity", measure)
    assert main([*argv, *more]) == 1
    shown = capsys.readouterr()
    assert f"error: {out}: is there already\nhint: give another name" in shown.err
    assert out.read_text() == "of another"
    assert not record.exists()
    if more:
        assert json.loads(shown.out) == expected
        out.write_bytes(file_bytes(expected))
        record.write_bytes(kept)
        assert verify(out) == []
    else:
        assert "│ mean KL, nats" in shown.out


def test_a_place_that_takes_no_file_is_found_before_anything_is_measured(
    world, monkeypatch, capsys
):
    """`os.access` says that root may write in /proc; only trying tells."""
    argv, out = world
    if not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    monkeypatch.setattr("emberbox.measure.fidelity.measure_fidelity", None)
    assert main([*argv, "-o", "/proc/out.json"]) == 1
    assert "/proc" in capsys.readouterr().err
    assert not out.exists()
