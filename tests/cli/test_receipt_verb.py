"""The verb `receipt`, as people and programs call it."""

import json
from pathlib import Path

import pytest

from emberbox.cli.main import main
from emberbox.measure.compare import compare
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
