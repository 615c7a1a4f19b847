"""The verb `receipt`, as people and programs call it."""

import json
from pathlib import Path

import pytest

from emberbox.cli.main import main
from emberbox.measure.compare import compare
from emberbox.measure.receipt import seal_of
from emberbox.measure.speed import Run, SpeedOptions
from emberbox.measure.speed_receipt import SpeedFacts, build_speed_receipt, save_speed
from tests.helpers.receipts import edit, small_panel, write_receipt

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def files(tmp_path):
    """Two good receipts of one panel."""
    panel = small_panel(windows=11)
    plain = write_receipt(tmp_path / "plain.json", 0.5, 1, panel)
    return plain, write_receipt(tmp_path / "ours.json", 0.4, 2, panel)


def call(*argv):
    return main(["receipt", *map(str, argv)])


def test_show_prints_each_file(files, capsys):
    assert call("show", files[0].path, files[1].path) == 0
    said = capsys.readouterr().out
    assert "receipt plain" in said
    assert "receipt ours" in said
    assert said.count("│ top-1 agreement") == 2


def test_show_as_json_is_the_documents(files, capsys):
    assert call("show", files[0].path, "--json") == 0
    assert json.loads(capsys.readouterr().out) == [files[0].document]


def test_verify_says_what_is_good(files, capsys):
    assert call("verify", files[0].path, files[1].path) == 0
    said = capsys.readouterr().out
    assert said.count("good; 11 windows, ") == 2
    assert "panel 'small' does not ship with emberbox: give it with --panel" in said


def test_verify_fails_when_one_of_several_is_crooked(files, capsys):
    plain, ours = files
    edit(ours.path, lambda d: d["results"]["kl"].update(value=0.001))
    assert call("verify", plain.path, ours.path) == 1
    said = capsys.readouterr().out
    assert "plain.json: good" in said
    assert "ours.json: 1 problem(s)\n  - results.kl.value is 0.001, computed 0.0" in said


def test_verify_as_json_lists_problems_by_file(files, capsys):
    plain, ours = files
    edit(ours.path, lambda d: d["runs"].update(count=3))
    assert call("verify", plain.path, ours.path, "--json") == 1
    assert json.loads(capsys.readouterr().out) == {
        str(plain.path): [],
        str(ours.path): ["runs.count is 3, computed 2"],
    }


def test_verify_holds_a_receipt_to_the_panel_that_is_given(files, tmp_path, capsys):
    windows = [
        {
            "id": each.id,
            "document": each.document,
            "domain": each.domain,
            "token_ids": list(each.token_ids),
        }
        for each in small_panel(windows=11, seed=1).windows
    ]
    panel = tmp_path / "other.json"
    panel.write_text(json.dumps({"schema": "emberbox.panel.v1", "windows": windows}))
    assert call("verify", files[0].path, "--panel", panel) == 1
    assert "panel.windows[10].token_sha256 is " in capsys.readouterr().out


def test_an_empty_name_of_a_panel_is_no_panel(files, capsys):
    assert call("verify", files[0].path, "--panel", "") == 1
    assert "there is no panel ''" in capsys.readouterr().err


def test_compare_prints_the_difference(files, capsys):
    plain, ours = files
    assert call("compare", plain.path, ours.path) == 0
    assert "ours against plain on small, weights" in capsys.readouterr().out
    assert call("compare", plain.path, ours.path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    expected = compare(plain, ours)
    assert found["all"]["difference"] == expected.all.difference
    assert found["all"]["interval"] == list(expected.all.interval)
    assert found["groups"]["prose"]["p_value"] == expected.groups["prose"].p_value


def test_compare_refuses_a_crooked_receipt(files, capsys):
    plain, ours = files
    edit(ours.path, lambda d: d["results"]["top1"].update(value=0.99))
    assert call("compare", plain.path, ours.path) == 1
    assert "results.top1.value is 0.99" in capsys.readouterr().err


def test_compare_refuses_unlike_receipts_and_says_why(files, capsys):
    plain, ours = files
    edit(ours.path, lambda d: d.update(lane="served"))
    assert call("compare", plain.path, ours.path, "--json") == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "MeasureError"
    assert "lane: weights in plain, served in ours" in error["message"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["compare", "a.json"], "1 file(s), expected 2"),
        (["compare", "a.json", "b.json", "c.json"], "3 file(s), expected 2"),
        (["show", "a.json", "--panel", "x"], "--panel: only `receipt verify` takes it"),
        (["improve", "a.json"], "invalid choice: 'improve'"),
        (["show"], "required: FILE"),
    ],
)
def test_bad_usage_is_said(argv, said, capsys):
    assert call(*argv) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_no_receipt_is_said(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    assert call("show", tmp_path / "a.json") == 1
    assert "not a receipt" in capsys.readouterr().err
    assert call("verify", tmp_path / "a.json") == 1
    assert call("verify", tmp_path / "none.json") == 1


OTHERS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("action", ["show", "verify"])
def test_results_of_a_benchmark_are_told_in_a_line(path, action, capsys):
    assert call(action, path, "--json") == 1
    said = json.loads(capsys.readouterr().out)
    text = said["error"]["message"] if action == "show" else said[str(path)][0]
    assert "\n" not in text
    date = json.loads(path.read_text())["date"]
    assert text == (
        f"{path}: results of a benchmark (emberbox 0.1.0, {date}), not a receipt of fidelity"
    )


def test_other_documents_are_told_in_a_line(capsys):
    losses = ROOT / "receipts" / "nano" / "recipes" / "sensitivity.json"
    assert call("show", losses) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "schema is 'emberbox.sensitivity.v1', expected 'emberbox.fidelity.v1'" in said


# -- receipts of speed -----------------------------------------------------------------------------


@pytest.fixture
def speed(tmp_path):
    """Of a run of three steps, 9 ms in all, and of two requests at once."""
    facts = SpeedFacts(
        command="emberbox measure speed here --engine",
        model={"name": "here"},
        device={"name": "this one [0]"},
        op_table={},
        settings={},
        plan={"weights": 700, "reserve": 9},
        peak_bytes=745,
    )
    runs = [
        Run(
            kind=kind,
            context=1024,
            step_tokens=1,
            num_requests=count,
            num_tokens=3 * count,
            wall_ms=9.0,
            step_ms=(2.0, 3.0, 4.0),
        )
        for kind, count in (("decode", 1), ("replies", 2))
    ]
    path = tmp_path / "speed.json"
    options = SpeedOptions(step_tokens=(1,), concurrency=(2,), prompt_tokens=1024)
    save_speed(path, build_speed_receipt(facts, options, runs))
    return path


def sealed(path, change):
    """Edits a receipt of speed as one who knows of the seal."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps({**document, "sha256": seal_of(document)}))


def test_a_receipt_of_speed_is_shown_among_others(files, speed, capsys):
    assert call("show", files[0].path, speed) == 0
    said = capsys.readouterr().out
    assert "receipt plain" in said
    assert "here on this one [0], emberbox 0.1.0" in said
    lines = {line.split()[0]: line.split()[-1] for line in said.splitlines() if line.strip()}
    assert lines["decode_tok_s.c1.ctx1k"] == "333.333"
    assert lines["decode_tok_s.c2.wall"] == "666.667"
    assert call("show", speed, files[0].path, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == [json.loads(speed.read_text()), files[0].document]


def test_a_receipt_of_speed_is_verified_among_others(files, speed, capsys):
    assert call("verify", speed, files[0].path) == 0
    said = capsys.readouterr().out
    assert "speed.json: good; 2 runs, 6 steps, every figure computed again" in said
    assert "plain.json: good; 11 windows" in said
    sealed(speed, lambda d: d["results"].update({"step_ms.m1": 2.5}))
    assert call("verify", speed, files[0].path) == 1
    assert "speed.json: 1 problem(s)\n  - results.step_ms.m1 is 2.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(plan=[1]),
        lambda d: d.update(raw=["x"]),
        lambda d: d["raw"][0].update(num_tokens=10**400),
        lambda d: d.pop("results"),
    ],
    ids=["plan", "raw", "number", "results"],
)
def test_a_receipt_of_speed_of_another_form_is_told(speed, capsys, change):
    sealed(speed, change)
    assert call("verify", speed) == 1
    assert "speed.json: " in capsys.readouterr().out


def test_a_receipt_of_speed_that_cannot_be_shown_is_told(speed, capsys):
    sealed(speed, lambda d: d.pop("results"))
    assert call("show", speed) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "speed.json: not a whole receipt of speed: - results is missing" in said


def test_receipts_of_speed_are_not_compared(files, speed, capsys):
    assert call("compare", files[0].path, speed) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "speed.json: a receipt of speed; compare takes two of fidelity" in said


# -- of both kinds ---------------------------------------------------------------------------------


def edit_speed(path):
    document = json.loads(path.read_text())
    document["results"]["decode_tok_s.c2.wall"] = 987.5
    path.write_text(json.dumps(document))


def edit_fidelity(path):
    edit(path, lambda d: d["results"]["kl"].update(value=0.9875), reseal=False)


@pytest.mark.parametrize(
    ("kind", "change", "false"),
    [("speed", edit_speed, "987.5"), ("fidelity", edit_fidelity, "0.9875")],
)
def test_an_edited_receipt_is_shown_as_such(files, speed, capsys, kind, change, false):
    file = speed if kind == "speed" else files[0].path
    said = f"{file}: edited since it was sealed"
    assert call("show", file) == 0
    shown = capsys.readouterr()
    assert "edited" not in shown.out + shown.err
    change(file)
    assert call("show", file) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(said)
    assert false in shown
    assert call("show", file, "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == [json.loads(file.read_text())]
    assert said in shown.err
    assert call("verify", file) == 1


@pytest.mark.parametrize("letters", ["\x1b[31mred\x07", "a\rb", "\x9b2J", "\u202e1"])
@pytest.mark.parametrize(
    "change",
    [
        lambda d, letters: d["device"].update(name=letters),
        lambda d, letters: d["model"].update(name=letters),
        lambda d, letters: d["emberbox"].update(version=letters),
        lambda d, letters: d["results"].update({"step_ms.m1": letters}),
        lambda d, letters: d["results"].update({letters: 1.0}),
    ],
    ids=["device", "model", "version", "figure", "name of a figure"],
)
def test_nothing_in_a_receipt_of_speed_steers_the_terminal(speed, capsys, change, letters):
    sealed(speed, lambda d: change(d, letters))
    for action in ("show", "verify"):
        assert call(action, speed) == 1
        shown = capsys.readouterr()
        assert not set(shown.out + shown.err) & set(letters) - set("[31mredab2J")
