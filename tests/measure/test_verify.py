"""Crooked receipts are found out: each made by really tampering with a good one."""

import json
import lzma
import shutil
from dataclasses import replace

import numpy as np
import pytest

from emberbox.measure import panel as panel_module
from emberbox.measure.documents import canonical_json
from emberbox.measure.panel import Panel, load_panel
from emberbox.measure.receipt import build_receipt, file_bytes, load, run_of
from emberbox.measure.record import as_stored, write_record
from emberbox.measure.verify import is_shipped, verify
from tests.helpers.receipts import (
    artifact_facts,
    edit,
    fix_record_hash,
    measured,
    small_panel,
    small_windows,
    write_receipt,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two good receipts: good.json, and better.json of the same panel with a closer candidate."""
    found = tmp_path_factory.mktemp("receipts")
    write_receipt(found / "good.json")
    write_receipt(found / "better.json", noise=0.1, seed=5)
    return found


@pytest.fixture
def path(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "r")
    return tmp_path / "r" / "good.json"


def record_of(path):
    return path.with_name(path.stem + ".record.xz")


def rewrite(path, windows, panel):
    """A whole new set of record, figures and hashes at `path`, as the best of crooks would."""
    document = json.loads(path.read_bytes())
    digest = write_record(record_of(path), windows)
    facts = measured(panel, windows, candidate=document["candidate"])
    new = build_receipt(facts, as_stored(windows), record_of(path).name, digest)
    path.write_bytes(file_bytes(new))


def test_good_receipts_are_good(folder):
    assert verify(folder / "good.json") == []
    assert verify(folder / "better.json") == []


def test_a_receipt_of_a_broken_candidate_is_still_good(tmp_path):
    panel = small_panel()
    windows = small_windows(panel, 0.5)
    broken = windows[2][1]
    broken.finite[3], broken.kl[3], broken.top1[3], broken.top5[3] = False, np.nan, False, 0
    for column in ("reverse_kl", "reference_nll", "candidate_nll"):
        getattr(broken, column)[3] = np.nan
    facts = measured(panel, windows)
    digest = write_record(tmp_path / "a.record.xz", windows)
    document = build_receipt(facts, as_stored(windows), "a.record.xz", digest)
    (tmp_path / "a.json").write_bytes(file_bytes(document))
    assert document["results"]["non_finite"] == 1
    assert verify(tmp_path / "a.json") == []


def test_an_edited_figure_breaks_the_seal(path):
    edit(path, lambda d: d["candidate"].update(name="ours"), reseal=False)
    (problem,) = verify(path)
    assert "the document's is" in problem
    assert "edited" in problem


FIGURES = [
    ("kl", "value"),
    ("kl", "interval", 0),
    ("kl", "interval", 1),
    ("reverse_kl", "value"),
    ("top1", "value"),
    ("top5", "value"),
    ("top1", "interval", 1),
    ("reference_perplexity", "value"),
    ("candidate_perplexity", "value"),
    ("candidate_perplexity", "interval", 0),
    ("kl_spread", "p50"),
    ("kl_spread", "p99"),
    ("kl_spread", "cvar95"),
    ("positions",),
    ("non_finite",),
    ("bootstrap", "resamples"),
    ("domains", 0, "kl", "value"),
    ("domains", 1, "windows"),
    ("domains", 1, "top1", "value"),
    ("windows", 3, "kl"),
    ("windows", 3, "kl_spread", "max"),
    ("windows", 6, "top1"),
    ("windows", 6, "domain"),
]


@pytest.mark.parametrize("keys", FIGURES, ids=lambda keys: ".".join(map(str, keys)))
def test_an_edited_figure_with_the_hash_fixed_up_is_named(path, keys):
    def change(document):
        found = document["results"]
        for key in keys[:-1]:
            found = found[key]
        old = found[keys[-1]]
        found[keys[-1]] = {int: lambda: old + 1, float: lambda: old * (1 - 1e-6)}.get(
            type(old), lambda: "other"
        )()

    edit(path, change)
    (problem,) = verify(path)
    place = "results" + "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in keys)
    assert problem.startswith(f"{place} is ")


def test_a_missing_interval_is_named(path):
    edit(path, lambda d: d["results"]["kl"].update(interval=None))
    (problem,) = verify(path)
    assert problem.startswith("results.kl.interval is None, computed [0.0")


def test_a_missing_window_is_named(path):
    edit(path, lambda d: d["results"]["windows"].pop())
    assert verify(path) == ["results.windows has 6 entries, expected 7"]


def test_rounding_of_another_c_library_is_no_problem(path):
    def change(document):
        for side in ("reference_perplexity", "candidate_perplexity"):
            document["results"][side]["value"] *= 1 + 1e-15

    edit(path, change)
    assert verify(path) == []


def test_another_record_is_found_by_its_hash(path):
    shutil.copy(path.with_name("better.record.xz"), record_of(path))
    problems = verify(path)
    assert problems[0].startswith("record.bytes is ") or problems[0].startswith("record.sha256 is ")
    assert any(problem.startswith("record.sha256 is ") for problem in problems)
    assert any(problem.startswith("results.kl.value is ") for problem in problems)


def test_a_swapped_record_with_the_hash_fixed_up_is_found_by_the_figures(path):
    shutil.copy(path.with_name("better.record.xz"), record_of(path))
    fix_record_hash(path)
    problems = verify(path)
    assert not any("sha256 is" in p and "runs" not in p for p in problems)
    named = " ".join(problems)
    assert "results.kl.value is" in named
    assert "results.top1.value is" in named
    assert "runs.record_sha256[0] is" in named
    assert "runs.kl[0] is" in named


def test_a_record_with_one_better_position_is_found(path):
    receipt = load(path)
    record = receipt.read_record()
    record["w04"].kl[:] = 0
    write_record(record_of(path), list(record.items()))
    fix_record_hash(path)
    places = {problem.partition(" is ")[0] for problem in verify(path)}
    assert {"results.kl.value", "results.windows[4].kl", "runs.kl[0]"} <= places
    assert "results.windows[3].kl" not in places
    assert "results.top1.value" not in places


def test_a_window_that_counts_twice_in_the_panel_is_found(path):
    panel = small_panel()
    twice = (*panel.windows[:-1], replace(panel.windows[2], id="w06"))
    doubled = Panel(panel.name, twice, panel.sha256)
    rewrite(path, small_windows(doubled, 0.5), doubled)
    assert verify(path) == ["panel: windows 'w02' and 'w06' are the same tokens"]


def test_a_window_whose_record_is_that_of_another_is_found(path):
    panel = small_panel()
    windows = small_windows(panel, 0.5)
    windows[3] = ("w03", windows[0][1])  # as long, and of an easier text
    assert len(windows[3][1]) == panel.windows[3].num_positions
    rewrite(path, windows, panel)
    assert verify(path) == ["record: windows 'w00' and 'w03' hold the same figures"]


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """A folder of shipped panels with one in it, named "small"."""
    folder = tmp_path / "panels"
    folder.mkdir()
    windows = [
        {
            "id": each.id,
            "document": each.document,
            "domain": each.domain,
            "source": "made up",
            "token_ids": list(each.token_ids),
        }
        for each in small_panel().windows
    ]
    document = {
        "schema": "emberbox.panel.v1",
        "name": "small",
        "about": "for this test",
        "tokenizer_sha256": None,
        "windows": windows,
    }
    (folder / "small.json").write_bytes(canonical_json(document))
    monkeypatch.setattr(panel_module, "SHIPPED", folder)
    return load_panel("small")


def test_the_shipped_panel_is_recognised(tmp_path, shipped):
    receipt = write_receipt(tmp_path / "a.json", panel=shipped)
    assert verify(receipt.path) == []


def test_another_panel_under_a_shipped_name_is_found(tmp_path, shipped):
    easier = small_panel("small", seed=3)
    receipt = write_receipt(tmp_path / "a.json", panel=easier)
    problems = verify(receipt.path)
    assert problems[0] == f"panel.sha256 is {easier.sha256}, small has {shipped.sha256}"
    assert problems[1].startswith("panel.windows[0].token_sha256 is ")
    assert len(problems) == 1 + len(easier.windows)


def test_the_hash_of_a_shipped_panel_under_another_name_is_found(tmp_path, shipped):
    renamed = replace(shipped, name="sma\u200bll")
    assert verify(write_receipt(tmp_path / "a.json", panel=renamed).path) == [
        "panel.name is 'sma\\u200bll', its sha256 is that of 'small'"
    ]
    easier = Panel("mine", small_panel(seed=3).windows, shipped.sha256)
    receipt = write_receipt(tmp_path / "b.json", panel=easier)
    problems = verify(receipt.path)
    assert problems[0] == "panel.name is 'mine', its sha256 is that of 'small'"
    assert len(problems) == 1 + len(easier.windows)
    assert is_shipped(receipt)


def test_another_panel_with_the_hash_of_the_shipped_one_is_found(tmp_path, shipped):
    easier = Panel("small", small_panel("small", windows=6).windows, shipped.sha256)
    receipt = write_receipt(tmp_path / "a.json", panel=easier)
    assert verify(receipt.path) == ["panel.windows has 6 entries, expected 7"]


def test_windows_moved_to_another_domain_are_found(tmp_path, shipped):
    moved = replace(
        shipped, windows=(replace(shipped.windows[0], domain="code"), *shipped.windows[1:])
    )
    receipt = write_receipt(tmp_path / "a.json", panel=moved)
    (problem,) = verify(receipt.path)
    assert problem == "panel.windows[0].domain is 'code', computed 'prose'"


def test_a_panel_that_does_not_ship_is_compared_when_it_is_given(path):
    assert verify(path, small_panel()) == []
    problems = verify(path, small_panel(seed=1))
    assert problems[0].startswith("panel.sha256 is ")


def test_a_truncated_record_is_found(path):
    raw = record_of(path).read_bytes()
    record_of(path).write_bytes(raw[: len(raw) // 2])
    fix_record_hash(path)
    (problem,) = verify(path)
    assert "good.record.xz: ends too early" in problem


def test_a_missing_record_is_found(path):
    record_of(path).unlink()
    (problem,) = verify(path)
    assert "good.record.xz: cannot be read: no such file" in problem


def test_a_bomb_is_found_and_not_inflated(path):
    raw = lzma.decompress(record_of(path).read_bytes())
    record_of(path).write_bytes(lzma.compress(raw + bytes(4 << 20)))
    fix_record_hash(path)
    (problem,) = verify(path)
    assert "holds more than the" in problem


def test_a_record_that_is_a_device_is_not_read_for_ever(path):
    record_of(path).unlink()
    record_of(path).symlink_to("/dev/zero")
    (problem,) = verify(path)
    assert "good.record.xz: cannot be read: not a file" in problem


def test_pretty_printed_is_not_canonical(path):
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps(document, indent=1))
    assert verify(path) == ["the file is not canonical JSON: it was written by something else"]


def test_bytes_that_do_not_add_up_are_found(path):
    edit(path, lambda d: d["candidate"].update(num_bytes=7000))
    (problem,) = verify(path)
    assert problem == "candidate.num_bytes is 7000, its storage adds up to 8000"


def test_bits_that_do_not_follow_are_found(path):
    edit(path, lambda d: d["candidate"]["storage"][1].update(bits=4.0))
    (problem,) = verify(path)
    assert problem == "candidate.storage: attention has 4.0 bits, computed 16.0000"


def test_a_config_that_is_not_the_file_of_the_folder_is_found(path):
    edit(path, lambda d: d["reference"]["files"].update({"config.json": "ab" * 32}))
    (problem,) = verify(path)
    assert problem.startswith("reference.config_sha256 is ")


def test_a_made_up_second_run_is_found(path):
    def change(document):
        document["runs"]["kl"][1] *= 1.5

    edit(path, change)
    problems = verify(path)
    assert problems[0].startswith("runs.kl_spread is 0.0, computed 0.0")
    assert problems[1] == "runs: equal records cannot have different figures"


def test_more_runs_than_there_are_are_found(path):
    edit(path, lambda d: d["runs"].update(count=5))
    assert verify(path) == ["runs.count is 5, computed 2"]


def test_the_reference_against_itself_must_be_exact(tmp_path):
    same = artifact_facts("big", 50_000)
    assert verify(write_receipt(tmp_path / "a.json", noise=0.0, candidate=same).path) == []
    problems = verify(write_receipt(tmp_path / "b.json", noise=1e-3, candidate=same).path)
    assert problems[0] == "kl of the reference against itself is not 0.0"
    served = write_receipt(tmp_path / "c.json", noise=1e-3, candidate=same, lane="served")
    assert verify(served.path) == []


def test_a_later_metric_is_not_computed_with_this_one(path):
    edit(path, lambda d: d.update(metric_version=2))
    (problem,) = verify(path)
    assert problem == "metric_version is 2, this emberbox computes version 1"


def test_what_is_no_receipt_is_one_problem(path):
    path.write_text("{}")
    (problem,) = verify(path)
    assert "not a receipt" in problem
    assert "schema is missing" in problem


def test_runs_are_equal_when_their_records_are():
    panel = small_panel()
    assert run_of(small_windows(panel, 0.5)) == run_of(small_windows(panel, 0.5))
    assert run_of(small_windows(panel, 0.5)) != run_of(small_windows(panel, 0.5, seed=1))
