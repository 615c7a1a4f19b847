"""The layout that kernels read: a repack without a bit lost, and readable from its description."""

from pathlib import Path

import numpy as np
import pytest
import torch

from emberbox.errors import OpError
from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.formats.trellis import RATES
from emberbox.ops import prepared as module
from emberbox.ops.inputs import Random
from emberbox.ops.linear_exl3 import random_weight
from emberbox.ops.moe_experts import make_inputs
from emberbox.ops.moe_experts.bank import ExpertBank, bank_of
from emberbox.ops.prepared import PREPARED, prepare, prepared, restore
from emberbox.ops.table import OpTable

TILES = np.load(Path(__file__).parents[1] / "golden" / "exl3_tiles.npz")
RATE_NAMES = {num_words: f"{num_words / 16:g}".replace(".", "p") for num_words in sorted(RATES)}
MARK = torch.tensor(1, dtype=torch.int32)


def random_tiles(rows, columns, num_words, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns, num_words)
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)


def windows_of(words, num_words):
    """A reader of one [32 W] piece, written from the page: windows [8 tiles, 256] by position.

    Lane l's own bits of the eight tiles follow one another, first bit highest, in W words; the
    words of the lanes lie together in loads of 4, then 2, then 1 words. A position's window is the
    16 bits of the tile's ring that end with its own.
    """
    per_lane, values = num_words // 8, [int(word) & 0xFFFFFFFF for word in words]
    loads, at = [], 0
    for size in [4] * (per_lane // 4) + [2] * (per_lane % 4 // 2) + [1] * (per_lane % 2):
        loads.append((at, size))
        at += 32 * size
    assert at == len(values)
    lanes = [
        "".join(f"{values[a + lane * size + i]:032b}" for a, size in loads for i in range(size))
        for lane in range(32)
    ]
    own, (even, odd) = 4 * per_lane, RATES[num_words]
    found = []
    for tile in range(8):
        ring = "".join(bits[tile * own : (tile + 1) * own] for bits in lanes)
        end, windows = 0, []
        for position in range(256):
            end += odd if position % 2 else even
            windows.append(int((ring + ring)[len(ring) + end - 16 : len(ring) + end], 2))
        assert end == len(ring)
        found.append(windows)
    return np.array(found)


@pytest.mark.parametrize("num_words", RATE_NAMES, ids=RATE_NAMES.values())
def test_a_reader_of_the_page_finds_the_golden_windows(num_words):
    rate = RATE_NAMES[num_words]
    packed = torch.from_numpy(TILES[f"packed_k{rate}"].view(np.int16))
    order = torch.tensor([2, 0, 1, 3, 3, 1, 0, 2])  # eight tiles side by side, none where it was
    words = prepare(packed[order].unsqueeze(0))
    assert words.shape == (1, 1, 4 * num_words)
    found = windows_of(words[0, 0].tolist(), num_words)
    assert np.array_equal(found, TILES[f"windows_k{rate}"][order.numpy()])


@pytest.mark.parametrize("num_words", RATE_NAMES, ids=RATE_NAMES.values())
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (3, 5), (8, 2)])
def test_what_is_restored_is_what_was_stored(num_words, rows, groups):
    stored = random_tiles(rows, 8 * groups, num_words, seed=rows)
    words = prepare(stored)
    assert words.shape == (groups, rows, 4 * num_words)
    assert words.nbytes == stored.nbytes
    assert words.is_contiguous()
    assert torch.equal(restore(words), stored)


def test_tiles_lie_by_128_outputs_then_by_16_inputs():
    stored = random_tiles(3, 24, 32)
    words = prepare(stored)
    for group in range(3):
        for row in range(3):
            own = stored[row : row + 1, 8 * group : 8 * group + 8]
            assert torch.equal(prepare(own)[0, 0], words[group, row])


def test_piece_by_piece_is_the_same(monkeypatch):
    stored = random_tiles(5, 56, 40)
    whole = prepare(stored)
    monkeypatch.setattr(module, "PIECE_BYTES", 3 * 5 * 4 * 40 * 4 + 1)
    assert torch.equal(prepare(stored), whole)
    monkeypatch.setattr(module, "PIECE_BYTES", 1)
    assert torch.equal(prepare(stored), whole)


@pytest.mark.parametrize(("columns", "num_words"), [(12, 32), (8, 72), (8, 20), (0, 12)])
def test_other_tiles_are_refused(columns, num_words):
    with pytest.raises(OpError, match="expected a multiple of 8 tiles"):
        prepare(torch.zeros(2, columns, num_words, dtype=torch.int16))


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (1, 1)])
@pytest.mark.parametrize(
    ("num_words", "marker"), [(16, "mul1"), (56, "mul1"), (48, "mcg"), (128, None)]
)
def test_a_prepared_weight_decodes_to_what_the_stored_one_does(shape, num_words, marker):
    stored = random_weight(Random(3, torch.float32), shape, num_words, marker)
    ready = prepared(stored)
    assert ready.format is PREPARED
    assert ready.shape == shape
    assert ready.num_bytes == stored.num_bytes
    assert torch.equal(ready.decode(), stored.decode())
    assert prepared(ready) is ready


def test_signs_of_old_files_become_scales():
    stored = random_weight(Random(1, torch.float32), (256, 128), 32, "mul1")
    parts = {"trellis": stored.parts["trellis"], "mul1": MARK}
    parts["su"] = random_tiles(1, 1, 8)[0, 0]
    parts["sv"] = random_tiles(1, 1, 16)[0, 0]
    old = QuantTensor(exl3.FORMAT, parts, (256, 128))
    ready = prepared(old)
    assert set(ready.parts["suh"].tolist()) == {-1.0, 1.0}
    assert torch.equal(ready.decode(), old.decode())


@pytest.mark.parametrize("size", [0, 31, 32 * 3 + 1, 32 * 9])
def test_words_of_no_rate_are_named(size):
    parts = {
        "words": torch.zeros(1, 8, size, dtype=torch.int32),
        "suh": torch.ones(128).half(),
        "svh": torch.ones(128).half(),
    }
    with pytest.raises(OpError, match=f"{size} words"):
        QuantTensor(PREPARED, parts, (128, 128))


def test_both_codebooks_at_once_are_refused():
    ready = prepared(random_weight(Random(1, torch.float32), (128, 128), 32, "mul1"))
    with pytest.raises(OpError, match="one codebook"):
        QuantTensor(PREPARED, {**ready.parts, "mcg": MARK}, (128, 128))


def test_products_of_prepared_weights_answer_to_the_op_of_the_stored_ones():
    table = OpTable.reference()
    stored = random_weight(Random(2, torch.float32), (130, 100), 32, "mul1")
    assert table.linear_for(prepared(stored)) is table.linear_exl3
    x = Random(5, torch.float32).normal(3, 100)
    assert torch.equal(table.linear_exl3(x, prepared(stored)), table.linear_exl3(x, stored))


# -- the experts of a layer ----------------------------------------------------------------------


def experts_of(number, hidden=128):
    inputs = make_inputs(1, number, hidden, quantised=1, dtype=torch.float32)
    return inputs["projections"]


def test_a_bank_holds_every_expert_prepared_and_says_where():
    experts = experts_of(5)
    bank = bank_of(experts)
    assert isinstance(bank, ExpertBank)
    assert bank.matrices.shape == (5, 3, 4)
    for expert, stored, row in zip(bank, experts, bank.matrices.tolist(), strict=True):
        for weight, before, (words, suh, svh, kind) in zip(expert, stored, row, strict=True):
            assert torch.equal(weight.decode(), before.decode())
            parts = weight.parts
            assert (words, suh, svh) == tuple(parts[n].data_ptr() for n in ("words", "suh", "svh"))
            book = 2 if "mul1" in parts else 1 if "mcg" in parts else 0
            assert kind == 4 * (before.parts["trellis"].shape[-1] // 8) + book
    # Expert 0: 2, 2 bits mul1 and 3 mcg; expert 1: 2.5, 2, 2 bits, all mul1.
    assert [row[3] for row in bank.matrices[0].tolist()] == [18, 18, 25]
    assert [row[3] for row in bank.matrices[1].tolist()] == [22, 18, 18]
    assert bank.kinds == ((18, 22), (18, 25))


def test_banks_are_made_once():
    bank = bank_of(experts_of(2))
    assert bank_of(bank)[1][2] is bank[1][2]
    assert bank.matrices is bank.matrices


@pytest.mark.parametrize("odd", ["plain", "another width", "no whole block", "none"])
def test_experts_that_no_kernel_takes_stay_as_they_are(odd):
    experts = experts_of(3)
    if odd == "plain":
        gate, up, down = experts[1]
        experts = (experts[0], (gate, up, down.decode()), experts[2])
    elif odd == "another width":
        experts = (*experts, experts_of(1, hidden=256)[0])
    elif odd == "no whole block":
        experts = experts_of(3, hidden=130)
    else:
        experts = ()
    assert bank_of(experts) is experts
