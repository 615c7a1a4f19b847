"""The page on formats: its decoder, its numbers and the package say the same."""

import re
from pathlib import Path

import pytest
import torch

from emberbox.formats import exl3, nvfp4
from emberbox.formats.base import QuantTensor
from emberbox.formats.codebooks import CODEBOOKS
from emberbox.formats.trellis import RATES, decode_tiles, element_order, unpack

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
WORDS = [0x1357 + 0x0801 * n & 0xFFFF for n in range(64 * 32)]


@pytest.fixture(scope="module")
def page():
    """The names that the page's decoder defines."""
    program = re.search(r"^```python\n(import struct\n.*?)^```", PAGE, re.M | re.S)[1]
    names: dict[str, object] = {}
    exec(compile(program, "docs/formats.md", "exec"), names)
    return names


def row(title):
    """The last cell of the page's table row that starts with `title`."""
    return re.search(rf"^\| {re.escape(title)} \| (.*) \|$", PAGE, re.M)[1]


def as_packed(words):
    return torch.tensor(words, dtype=torch.int32).to(torch.int16)


def hexadecimal(values):
    return " ".join(f"{int(value) & 0xFFFF:04X}" for value in values)


@pytest.mark.parametrize("num_words", sorted(RATES))
def test_the_decoder_of_the_page_gives_the_tiles_of_the_package(num_words, page):
    words = [(7919 * n * n + 40_503 * n + num_words) & 0xFFFF for n in range(num_words)]
    assert page["windows"](words) == unpack(as_packed(words)).tolist()
    for name, function in (("mul1", "mul1"), ("mcg", "mcg"), ("3inst", "three_inst")):
        tile = torch.tensor(page["tile"](words, page[function]), dtype=torch.float16)
        expected = decode_tiles(as_packed(words), CODEBOOKS[name])
        assert torch.equal(tile.view(torch.int16), expected.view(torch.int16))


def test_the_numbers_of_the_worked_example(page):
    words = WORDS[:32]
    shown = f"{hexadecimal(words[:4])} … {hexadecimal(words[30:])}"
    assert row("words 0…3, then 30 and 31") == shown
    windows = page["windows"](words)
    assert row("windows 0…7") == hexadecimal(windows[:8])
    assert row("window 255") == hexadecimal(windows[255:])
    product = 0x83DCD12D * windows[0] % 2**32
    assert f"0x{product:08X} modulo" in row("window 0, product")
    assert row("window 0, product").endswith(f"sum to {sum(product.to_bytes(4, 'little'))}")
    value = page["mul1"](windows[0])
    assert f"= −{-value}, float16 bits {page['to_bits'](value):04X}" in row("window 0, value")
    first = page["tile"](words, page["mul1"])[0][:8]
    assert row("row 0, outputs 0…7") == hexadecimal(map(page["to_bits"], first))


def test_the_drawing_of_positions_is_the_order_of_the_package():
    drawn = re.search(r"^Position of each element:\n\n```\n(.*?)```", PAGE, re.M | re.S)[1]
    assert [int(number) for number in drawn.split()] == element_order().tolist()


def test_the_drawing_of_the_ring_holds_the_bits_of_the_example(page):
    windows = page["windows"](WORDS[:32])
    assert f"window 7   {windows[7]:016b} " in PAGE
    assert f"window 0   {windows[0] >> 2:014b} {windows[0] & 3:02b} " in PAGE
    for word in (1, 0):
        assert f"{WORDS[word]:016b}" in PAGE
    assert PAGE.count(f"{WORDS[30]:016b}\n") == 1


def test_the_elements_of_the_whole_weight(page):
    channels = torch.arange(128)
    parts = {
        "trellis": as_packed(WORDS).view(8, 8, 32),
        "suh": torch.where(channels % 3 == 0, -0.5, 0.25).half(),
        "svh": torch.where(channels % 5 == 0, -1.0, 1.0).half(),
        "mul1": torch.tensor(0, dtype=torch.int32),
    }
    weight = QuantTensor(exl3.FORMAT, parts, (128, 128)).decode()
    grid = [
        [page["tile"](WORDS[s : s + 32], page["mul1"]) for s in range(r, r + 256, 32)]
        for r in range(0, 2048, 256)
    ]
    q = [[x for tile in tiles for x in tile[i]] for tiles in grid for i in range(16)]
    table = dict(re.findall(r"^\| \[(\d+, \d+)\] \| (.*) \|$", PAGE, re.M))
    assert len(table) == 5
    for element, text in table.items():
        out, inp = map(int, element.split(", "))
        by_hand = page["weight"](q, parts["suh"].tolist(), parts["svh"].tolist(), out, inp)
        assert f"{by_hand:.5f}".replace("-", "−") == text
        assert abs(float(weight[out, inp]) - by_hand) < 1e-6


def test_the_byte_of_the_page_on_nvfp4():
    codes = torch.full((1, 8), 0xF4, dtype=torch.uint8)
    scales = torch.full((1, 1), 2.0).to(torch.float8_e4m3fn)
    for fmt, scale in ((nvfp4.FORMAT, 0.25), (nvfp4.RECIPROCAL, 4.0)):
        parts = {"codes": codes, "scales": scales, "global": torch.tensor(scale)}
        assert QuantTensor(fmt, parts, (1, 16)).decode()[0, :2].tolist() == [1.0, -3.0]
    assert "2j has code 4 and is 2 · 2 · 0.25 = 1; input 2j+1 has code 15" in PAGE
    assert "−6 · 2 · 0.25 = −3" in PAGE
