"""`emberbox measure speed`, as people and programs call it."""

import json
import shlex

import pytest

from emberbox.cli.main import main
from emberbox.measure.speed import measure_speed
from emberbox.measure.speed_receipt import verify_speed
from emberbox.testing.synthetic_config import TINY
from tests.helpers.nano import NANO

SMALL = ["--context", "96", "--tokens", "3", "--warm-up", "1", "--step-tokens", "1,2"]
SMALL += ["--concurrency", "2", "--prompt-tokens", "9", "--reply-tokens", "4"]
SMALL += ["--device", "cpu", "--max-model-len", "128", "--max-running", "2"]


def argv_of(*subject):
    return ["measure", "speed", *subject, "--engine", *SMALL, "--log-level", "error"]


def test_it_measures_a_folder_and_writes_a_receipt_that_verifies(tmp_path, capsys):
    out = tmp_path / "speed.json"
    assert main([*argv_of(str(NANO)), "-o", str(out)]) == 0
    shown = capsys.readouterr().out
    document = json.loads(out.read_text())
    assert verify_speed(out) == []
    assert set(document["results"]) >= {
        "decode_tok_s.c1.ctx96",
        "decode_tok_s.c2.wall",
        "step_ms.m1",
        "step_ms.m2",
        "step_ratio.m2",
        "peak_bytes",
        "planned_bytes",
    }
    for key, value in document["results"].items():
        assert key in shown
        assert value > 0
    assert [len(run["step_ms"]) for run in document["raw"]] == [3, 3, 4]
    assert document["model"]["name"] == "ember-nano"
    assert not document["model"]["is_synthetic"]
    assert document["model"]["files"]["config.json"]
    assert document["settings"]["max_model_len"] == 128
    assert document["options"]["reply_tokens"] == 4
    assert document["device"]["kind"] == "cpu"
    assert document["emberbox"]["version"]
    assert document["plan"]["weights"] > 1e6


@pytest.mark.parametrize("place", ["after", "before"])
def test_json_is_the_receipt_of_a_model_that_is_made(capsys, place):
    argv = argv_of("--synthetic", TINY)
    argv = [*argv, "--json"] if place == "after" else ["measure", "--json", *argv[1:]]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["model"] == {
        "name": TINY,
        "seed": 0,
        "num_bytes": document["plan"]["weights"],
        "is_synthetic": True,
    }
    assert document["raw"][2]["num_tokens"] == 8


def test_the_command_in_a_receipt_measures_the_same_again(capsys):
    more = ["--seed", "3", "--fill", "random", "--cache-tokens", "256", "--no-verify", "--json"]
    assert main([*argv_of("--synthetic", TINY), *more]) == 0
    first = json.loads(capsys.readouterr().out)
    words = shlex.split(first["command"])
    assert words[0] == "emberbox"
    assert main([*words[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    for key in ("command", "model", "options", "settings", "plan"):
        assert again[key] == first[key]
    assert first["model"]["seed"] == 3


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (argv_of(), 2, "give a PATH or --synthetic NAME"),
        (argv_of(str(NANO), "--synthetic", TINY), 2, "give a PATH or --synthetic NAME"),
        (argv_of("--synthetic", "glm-6"), 2, "'glm-6' is not a model that can be made"),
        (argv_of("/no/such"), 1, "there is no such folder"),
        ("README", 1, "a file, expected the folder of config.json"),
        ([*argv_of("--synthetic", TINY), "--context", "1k"], 2, "'1k' is not a list"),
        ([*argv_of("--synthetic", TINY), "--context", ","], 2, "',' is not a list"),
        ([*argv_of("--synthetic", TINY), "--step-tokens", "1,,2"], 2, "'1,,2' is not a list"),
        ([*argv_of("--synthetic", TINY), "--concurrency", ","], 2, "',' is not a list"),
        ([*argv_of("--synthetic", TINY), "--context", ""], 2, "error: contexts: []\nhint: diff"),
        ([*argv_of("--synthetic", TINY), "--step-tokens", "9"], 2, "error: step_tokens: [9]\nhin"),
        ([*argv_of("--synthetic", TINY), "--step-tokens", ""], 2, "error: step_tokens: []\nhint"),
        ([*argv_of("--synthetic", TINY), "--step-tokens", "1,1,2"], 2, "step_tokens: [1, 1, 2]"),
        ([*argv_of("--synthetic", TINY), "--seed", str(1 << 64)], 2, f"seed: {1 << 64}"),
        ([*argv_of(str(NANO)), "--fill", "random", "--seed", "9" * 26], 2, "seed: 999999"),
        ([*argv_of("--synthetic", TINY), "--context", "129"], 1, "the engine holds 128"),
        ([*argv_of("--synthetic", TINY), "--fill", "ones"], 2, "fill: 'ones'"),
        ([*argv_of("--synthetic", TINY), "-o", "speed.txt"], 1, "not a place for a receipt"),
        ([*argv_of(str(NANO)), "-o", "none/a.json"], 1, "not a place for a receipt: No such file"),
        ([*argv_of(str(NANO)), "-o", "a" * 300 + ".json"], 1, "receipt: File name too long"),
        ([*argv_of(str(NANO)), "-o", "a" * 245 + ".json"], 1, "receipt: File name too long"),
        ([*argv_of(str(NANO)), "-o", "a" * 300 + "/a.json"], 1, "receipt: File name too long"),
        (["measure", "speed", str(NANO)], 2, "--engine"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(
    tmp_path, monkeypatch, capsys, argv, code, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("emberbox.measure.speed.Stopwatch", None)
    argv = argv_of(str(NANO / "README.md")) if argv == "README" else argv
    assert main(argv) == code
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_receipt_that_is_there_is_kept_unless_forced(tmp_path, capsys):
    out = tmp_path / "speed.json"
    argv = [*argv_of("--synthetic", TINY), "-o", str(out)]
    assert main(argv) == 0
    before = out.read_bytes()
    assert main(argv) == 1
    assert "is there already" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert main([*argv, "--force"]) == 0
    assert out.read_bytes() != before
    assert verify_speed(out) == []


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_figures_are_printed_where_the_receipt_cannot_be_kept(tmp_path, monkeypatch, capsys, more):
    """The name was free when it began, and another process took it meanwhile."""
    out = tmp_path / "speed.json"

    def measure(*arguments):
        found = measure_speed(*arguments)
        out.write_text("of another")
        return found

    monkeypatch.setattr("emberbox.measure.speed.measure_speed", measure)
    assert main([*argv_of("--synthetic", TINY), *more, "-o", str(out)]) == 1
    shown = capsys.readouterr()
    assert f"error: {out}: is there already\nhint: give another name" in shown.err
    assert out.read_text() == "of another"
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]
    if more:
        out.write_text(shown.out)  # one document, whole
        assert verify_speed(out) == []
    else:
        figures = dict(line.split() for line in shown.out.splitlines()[-20:] if "_ms" in line)
        assert float(figures["step_ms.m1"]) > 0


def test_no_requests_at_once_is_a_list_of_none(tmp_path, capsys):
    out = tmp_path / "speed.json"
    assert main([*argv_of("--synthetic", TINY), "--concurrency", "", "-o", str(out)]) == 0
    document = json.loads(out.read_text())
    assert {run["kind"] for run in document["raw"]} == {"decode"}
    assert "--concurrency ''" in document["command"]
    assert verify_speed(out) == []
    capsys.readouterr()
    assert main(["measure", "speed", "--help"]) == 0
    assert "requests at once; '' for no such runs" in capsys.readouterr().out
