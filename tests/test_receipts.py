"""Every receipt of fidelity that is published is good, and the table says what they say."""

import re
from pathlib import Path

import pytest

from emberbox.compress.calibration import load_calibration
from emberbox.measure.panel import load_panel
from emberbox.measure.receipt import load
from emberbox.measure.record import MAX_COMMITTED_BYTES
from emberbox.measure.verify import is_shipped, verify
from tests.helpers.nano import NANO
from tools import table

ROOT = Path(__file__).resolve().parents[1]
RECEIPTS = sorted((ROOT / "receipts" / "nano").glob("*.json"))  # recipes lie a folder deeper


def test_there_are_receipts():
    assert len(RECEIPTS) > 0


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.stem)
def test_a_committed_receipt_is_good(path):
    assert verify(path) == []
    receipt = load(path)
    assert is_shipped(receipt)  # so that verify compared the panel
    assert receipt["runs"]["count"] >= 2
    assert receipt.record_path.stat().st_size <= MAX_COMMITTED_BYTES


def runs(ids, length=24):
    return {tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)}


def test_what_candidates_were_calibrated_on_is_the_shipped_text():
    """By the hashes in the receipts; of rows that a receipt names, also which they were."""
    known = load_calibration(NANO, None, 1, 2, 0).sha256
    found = [load(path)["candidate"]["about"].get("calibration") for path in RECEIPTS]
    told = [each for each in found if each]
    assert len(told) >= 8
    assert {each["sha256"] for each in told} == {known}
    chosen = {(each["rows"], each["cols"], each["seed"]): each.get("rows_sha256") for each in told}
    for numbers, rows_sha256 in chosen.items():
        assert rows_sha256 in (None, load_calibration(NANO, None, *numbers).rows_sha256)


def test_what_candidates_were_tuned_on_is_a_text_that_the_table_says_how_to_make():
    texts = table.read_plan(ROOT / "receipts" / "nano" / table.PLAN).texts
    found = [load(path)["candidate"]["about"].get("tuning") for path in RECEIPTS]
    told = {each["text"]["sha256"] for each in found if each}
    assert len([each for each in found if each]) >= 9
    assert told == texts.keys()


LOG = (ROOT / "docs" / "log.md").read_text("utf-8")
FIGURE = re.compile(r"([0-9.]+) \[([0-9.]+), ([0-9.]+)\]")


def load_named(name):
    return load(ROOT / "receipts" / "nano" / f"{name}.json")


def rows_of_the_entry():
    """Cells of both tables of the log's entry, without their heads."""
    entry = LOG.partition("closer than plain EXL3 at the same bytes\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in entry.splitlines() if line.startswith("| ")]
    return entry, [[cell.strip() for cell in line] for line in lines]


def require_printed(cell, name):
    """The cell is the mean KL of that receipt, each number rounded as it is printed."""
    kl = load_named(name)["results"]["kl"]
    printed = FIGURE.fullmatch(cell)
    assert printed, (cell, name)
    for text, value in zip(printed.groups(), (kl["value"], *kl["interval"]), strict=True):
        assert f"{value:.{len(text.partition('.')[2])}f}" == text, (name, cell)


def test_the_tables_of_the_log_say_what_the_receipts_say():
    entry, rows = rows_of_the_entry()
    compared = []
    for row in rows:
        if arm := re.match(r"`(\w+)`", row[0]):
            names = [f"{arm[1]}-{seed}" for seed in range(3)]
            cells = row[1:4]
        elif base := re.fullmatch(r"([0-9,]+) \(`base([0-9.]+)`\)", row[0]):
            names, cells = [f"base{base[2]}", f"ours{base[2]}"], row[1:3]
            sizes = {load_named(name)["candidate"]["num_bytes"] for name in names}
            assert sizes == {int(base[1].replace(",", ""))}
        else:
            continue
        for name, cell in zip(names, cells, strict=True):
            if cell:
                require_printed(cell, name)
                compared.append(name)
    assert len(compared) == len(set(compared)) == 5 * 3 + 2 * 3
    assert f"{load_named('base2-0')['candidate']['num_bytes']:,} bytes | seed 0" in entry


def test_no_window_of_natural_text_has_a_run_of_tokens_of_the_calibration_text():
    text = load_calibration(NANO, None, 1 << 20, 8, 0).token_ids.flatten().tolist()
    windows = [w for w in load_panel("nano-25").windows if w.domain in ("prose", "code")]
    assert len(text) > 80_000
    assert len(windows) == 10
    ours = runs(text)
    assert not [window.id for window in windows if ours & runs(window.token_ids)]


def test_no_record_is_without_its_receipt():
    named = {load(path).record_path for path in RECEIPTS}
    assert set((ROOT / "receipts").rglob("*.record.xz")) == named


def test_the_table_is_drawn_from_them():
    folder = ROOT / "receipts" / "nano"
    assert (folder / "README.md").read_text("utf-8") == table.draw(folder)
