"""What people read: every figure with its panel, lane and interval."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from emberbox.measure.compare import compare
from emberbox.measure.show import (
    NAMES,
    bits_per_weight,
    figure_text,
    interval,
    number,
    plain_text,
    share,
    show,
    show_comparison,
)
from emberbox.measure.summary import FIGURES
from tests.helpers.receipts import artifact_facts, small_panel, write_receipt


@pytest.fixture
def receipt(tmp_path):
    return write_receipt(tmp_path / "small.json", panel=small_panel(windows=11))


def test_every_figure_is_shown_with_interval_panel_and_lane(receipt):
    text = plain_text(show(receipt))
    for figure in FIGURES:
        (line,) = (each for each in text.splitlines() if f"│ {NAMES[figure][0]} " in each)
        assert "small, weights" in line
        assert figure_text(receipt["results"][figure], is_share=NAMES[figure][1]) in line
        assert re.search(r"\[.+, .+\]", line)
    spread = [each for each in text.splitlines() if "│ KL, " in each]
    assert len(spread) == 5
    assert all("small, weights" in line for line in spread)
    values = receipt["results"]["kl_spread"].values()
    assert all(any(f" {number(value)} " in line for line in spread) for value in values)


def test_a_terminal_of_80_columns_is_wide_enough(receipt):
    receipt.document["panel"]["name"] = "nano-25"
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as capture:
        console.print(show(receipt))
    text = capture.get()
    for figure, (name, is_share) in NAMES.items():
        (line,) = (each for each in text.splitlines() if f"│ {name} " in each)
        assert figure_text(receipt["results"][figure], is_share=is_share) in line
        assert "nano-25, weights" in line


def test_what_was_measured_is_shown(receipt):
    text = plain_text(show(receipt))
    for said in (
        "small (" + receipt["candidate"]["map_sha256"][:12] + "): 8,000 bytes, 2.560 bits",
        "big (" + receipt["reference"]["map_sha256"][:12] + "): 50,000 bytes",
        f"11 windows, {receipt['results']['positions']:,} positions",
        "reference||candidate",
        "2, equal to the last bit",
        receipt["command"],
        "by domain, of small, weights",
    ):
        assert said in text


def test_domains_have_their_intervals(receipt):
    text = plain_text(show(receipt))
    prose = next(line for line in text.splitlines() if "│ prose" in line)
    (domain,) = (d for d in receipt["results"]["domains"] if d["domain"] == "prose")
    assert figure_text(domain["kl"]) in prose
    assert figure_text(domain["top1"], is_share=True) in prose


def test_few_windows_say_that_there_is_no_interval(tmp_path):
    text = plain_text(show(write_receipt(tmp_path / "a.json", panel=small_panel(windows=3))))
    assert text.count("[under 5 windows]") == 6 + 2 * 2


def test_what_is_not_finite_is_said_first(receipt):
    assert "not finite" not in plain_text(show(receipt))
    receipt.document["results"]["non_finite"] = 3
    assert "3 positions have logits that are not finite" in plain_text(show(receipt))


def test_runs_that_differ_say_by_how_much(receipt):
    receipt.document["runs"] |= {"record_sha256": ["a" * 64, "b" * 64], "kl_spread": 0.00123}
    assert "2, mean KL differs by 0.0012" in plain_text(show(receipt))
    receipt.document["runs"] |= {"record_sha256": ["a" * 64], "count": 1}
    assert "1: not repeated" in plain_text(show(receipt))


def test_brackets_in_names_are_text_and_no_markup(receipt):
    receipt.document["candidate"]["name"] = "[red]x[/nothing]"
    receipt.document["panel"]["name"] = "[bold]"
    text = plain_text(show(receipt))
    assert "[red]x[/nothing] (" in text
    assert "[bold], weights" in text


def test_a_comparison_shows_difference_interval_and_sign_test(tmp_path):
    panel = small_panel(windows=11)
    base = write_receipt(tmp_path / "plain.json", 0.5, 1, panel)
    new = write_receipt(
        tmp_path / "ours.json", 0.4, 2, panel, candidate=artifact_facts("ours", 8040)
    )
    found = compare(base, new)
    text = plain_text(show_comparison(found))
    assert "ours against plain on small, weights" in text
    row = next(line for line in text.splitlines() if line.startswith("│ all"))
    assert f"{number(found.all.difference)} {interval(found.all.interval)}" in row
    assert f"{100 * found.all.relative:+.1f} %" in row
    assert f"{found.all.better}/{found.all.worse}/0" in row
    assert f"{found.all.p_value:.2g}" in row
    assert "│ code" in text
    assert "plain: 8,000 bytes; ours: 8,040 bytes (+0.500 %)" in text
    assert "left out" not in text


def test_bits_count_every_byte(receipt):
    assert bits_per_weight(receipt["candidate"]) == 8 * 8000 / 25_000


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "none"), (0.0, "0"), (0.36, "0.3600"), (1161.2, "1161"), (1e-7, "1.000e-07")],
)
def test_numbers_have_four_digits(value, expected):
    assert number(value) == expected


def test_shares_are_per_cent():
    assert (share(0.88918), share(1.0), share(None)) == ("88.92 %", "100.00 %", "none")
    assert interval([0.5, 0.75], is_share=True) == "[50.00 %, 75.00 %]"


@pytest.mark.parametrize(
    ("difference", "interval", "said"),
    [
        (-0.1, (-0.2, -0.05), "new is closer to the reference than base"),
        (0.1, (0.05, 0.2), "new is farther from the reference than base"),
        (0.1, (-0.05, 0.2), "not decided: the interval holds 0"),
        (0.1, None, "too few windows to say"),
        (0.0, (0.0, 0.0), "no difference"),
    ],
)
def test_a_comparison_says_which_is_closer(difference, interval, said, tmp_path):
    one = write_receipt(tmp_path / "a.json")
    found = compare(one, one)
    paired = replace(found.all, difference=difference, interval=interval)
    text = plain_text(show_comparison(replace(found, base="base", new="new", all=paired)))
    assert said in text
