"""docs/kernels.md against the package: the layout's table and its example."""

import re
from pathlib import Path

import pytest
import torch

from emberbox.formats.trellis import unpack
from emberbox.ops.prepared import LANES, TILES, _sizes, prepare

PAGE = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text(encoding="utf-8")
LOADS = {1: "4", 2: "8", 4: "16"}
WORDS = [0x1357 + 0x0801 * n & 0xFFFF for n in range(64 * 32)]


def rows(head):
    """Cells of the page's table under a heading that starts with `head`, by the first of each."""
    body = PAGE.partition(f"| {head} ")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in body]
    return {line[0]: line[1:] for line in cells}


@pytest.fixture(scope="module")
def stored():
    return torch.tensor(WORDS, dtype=torch.int32).to(torch.int16).view(8, 8, 32)


@pytest.fixture(scope="module")
def lanes(stored):
    """Words of each lane for inputs 0 to 15, all eight tiles."""
    words = prepare(stored)[0, 0].view(LANES, -1).tolist()
    return [[word & 0xFFFFFFFF for word in each] for each in words]


def example(title):
    return re.search(rf"^\| {re.escape(title)} \| (.*) \|$", PAGE, re.M)[1]


def test_the_words_of_the_lanes(lanes):
    for lane in (0, 1, 31):
        assert example(f"lane {lane}") == " ".join(f"{word:08X}" for word in lanes[lane])


def test_the_windows_of_a_lane_are_those_of_its_positions(lanes, stored):
    own, before = lanes[0][0] >> 16, lanes[31][0] >> 16
    assert example("lane 0, own bits of tile 0").startswith(f"{own:04X},")
    assert example("lane 0, bits before them").startswith(f"{before:04X},")
    together = before << 16 | own
    assert example("together") == f"{together:08X}"
    windows = [together >> 14 - 2 * j & 0xFFFF for j in range(8)]
    assert example("windows of positions 0…7") == " ".join(f"{each:04X}" for each in windows)
    assert windows == unpack(stored[0, 0]).tolist()[:8]


def test_bits_words_and_loads_of_each_rate():
    table = rows("K | own bits")
    assert len(table) == 7
    for rate, (bits, words, loads) in table.items():
        num_words = round(16 * float(rate)) * TILES // LANES // 2
        assert int(bits) == 8 * float(rate) == num_words * 32 / TILES
        assert int(words) == num_words
        sizes = [LOADS[size] for size in _sizes(num_words)]
        times = {1: "", 2: ", twice", 3: ", three times"}[sizes.count(sizes[0])]
        expected = " and ".join(dict.fromkeys(sizes)) + " bytes" + times
        assert loads == expected
