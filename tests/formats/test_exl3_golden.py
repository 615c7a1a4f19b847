"""EXL3 against vectors that a reader of other make produced (tests/golden/README.md)."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.formats.codebooks import CODEBOOKS
from emberbox.formats.trellis import RATES, decode_tiles, pack, unpack

GOLDEN = Path(__file__).parents[1] / "golden"
TILES = np.load(GOLDEN / "exl3_tiles.npz")
LINEAR = np.load(GOLDEN / "exl3_linear.npz")
RATE_NAMES = {num_words: f"{num_words / 16:g}".replace(".", "p") for num_words in sorted(RATES)}
WEIGHTS = ["k2_mul1", "k3_mcg", "k4_3inst", "k2p5_mul1"]

# Over all windows: mean, deviation, least and largest value, distinct values, digest of the bits
TABLES = {
    "3inst": (0.00021, 1.24371, -3.957, 3.973, 10_598, "ad88de2dcff5bb05fff2faec37cceceb"),
    "mcg": (-0.00004, 1.24411, -3.949, 3.949, 10_746, "95383563929baa9d1ae5de0be2249028"),
    "mul1": (-0.00193, 1.00031, -3.453, 3.348, 913, "bc48d02cb1c14939dc47b90f870dd689"),
}


def bits(values):
    return values.view(torch.int16).numpy().view(np.uint16)


def packed_tiles(num_words):
    return torch.from_numpy(TILES[f"packed_k{RATE_NAMES[num_words]}"].view(np.int16))


def stored(name):
    parts = {part: torch.from_numpy(LINEAR[f"{name}_{part}"]) for part in ("trellis", "suh", "svh")}
    marker = name.split("_")[1]
    if marker != "3inst":
        parts[marker] = torch.tensor(CODEBOOKS[marker].multiplier - (1 << 32), dtype=torch.int32)
    return QuantTensor(exl3.FORMAT, parts, (len(parts["svh"]), len(parts["suh"])))


@pytest.mark.parametrize("name", sorted(CODEBOOKS))
def test_every_value_of_a_codebook_is_the_golden_one(name):
    values = CODEBOOKS[name].values()
    assert np.array_equal(bits(values), TILES[f"codebook_{name}"])
    mean, deviation, least, largest, distinct, digest = TABLES[name]
    exact = values.double().numpy()
    assert round(float(exact.mean()), 5) == mean
    assert round(float(exact.std()), 5) == deviation
    assert (round(float(exact.min()), 3), round(float(exact.max()), 3)) == (least, largest)
    assert len(np.unique(exact)) == distinct
    assert hashlib.sha256(bits(values).astype("<u2").tobytes()).hexdigest()[:32] == digest


@pytest.mark.parametrize("num_words", RATE_NAMES, ids=RATE_NAMES.values())
def test_windows_and_tiles_are_the_golden_ones_bit_for_bit(num_words):
    packed, rate = packed_tiles(num_words), RATE_NAMES[num_words]
    windows = unpack(packed)
    assert np.array_equal(windows.numpy(), TILES[f"windows_k{rate}"])
    assert torch.equal(pack(windows, num_words), packed)
    names = [name for name in CODEBOOKS if f"tile_k{rate}_{name}" in TILES]
    assert "mul1" in names
    assert len(names) == (1 if "p" in rate else 3)
    for name in names:
        tiles = decode_tiles(packed, CODEBOOKS[name])
        assert np.array_equal(bits(tiles), TILES[f"tile_k{rate}_{name}"]), name


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_matrix_between_the_rotations_is_the_golden_one_bit_for_bit(name):
    assert np.array_equal(bits(exl3.inner(stored(name).parts)), LINEAR[f"{name}_inner"])


@pytest.mark.parametrize("name", WEIGHTS)
def test_weight_and_product_are_the_golden_ones(name):
    weight = stored(name).decode()
    expected = LINEAR[f"{name}_weight_first16"]
    # Two float32 butterflies of 128; the vectors themselves were written in float32.
    error = np.abs(weight.T[:, :16].numpy() - expected).max()
    assert error <= 1e-6 * np.abs(expected).max()
    y = LINEAR[f"{name}_x"].astype(np.float64) @ weight.T.double().numpy()
    expected = LINEAR[f"{name}_y"]
    assert np.linalg.norm(y - expected) <= 1e-6 * np.linalg.norm(expected)


def test_golden_vectors_stay_small():
    own = [
        path for path in GOLDEN.iterdir() if path.name != "encode_layer.npz"
    ]  # has its own limit
    assert sum(path.stat().st_size for path in own) < 1_200_000
