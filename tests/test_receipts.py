"""Every receipt that the repository publishes is good, and the table says what they say."""

from pathlib import Path

import pytest

from emberbox.measure.receipt import load
from emberbox.measure.record import MAX_COMMITTED_BYTES
from emberbox.measure.verify import is_shipped, verify
from tools import table

ROOT = Path(__file__).resolve().parents[1]
RECEIPTS = sorted((ROOT / "receipts").glob("*/*.json"))  # recipes lie a folder deeper


def test_there_are_receipts():
    assert len(RECEIPTS) > 0


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.stem)
def test_a_committed_receipt_is_good(path):
    assert verify(path) == []
    receipt = load(path)
    assert is_shipped(receipt)  # so that verify compared the panel
    assert receipt["runs"]["count"] >= 2
    assert receipt.record_path.stat().st_size <= MAX_COMMITTED_BYTES


def test_no_record_is_without_its_receipt():
    named = {load(path).record_path for path in RECEIPTS}
    assert set((ROOT / "receipts").rglob("*.record.xz")) == named


def test_the_table_is_drawn_from_them():
    folder = ROOT / "receipts" / "nano"
    assert (folder / "README.md").read_text("utf-8") == table.draw(folder)
