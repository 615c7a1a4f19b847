"""Inputs of the kernels of EXL3 weights, chosen so that what must come out is known."""

import torch

from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.formats.trellis import RATES, is_half_rate
from emberbox.ops.inputs import Random
from emberbox.ops.linear_exl3 import random_weight

BOOKS = ("mul1", "mcg", "3inst")
# Words of a tile and codebook: every pair that files may hold.
KINDS = [
    (num_words, book)
    for num_words in sorted(RATES)
    for book in BOOKS
    if book == "mul1" or not is_half_rate(num_words)
]


def kind_name(kind):
    return f"{kind[0] / 16:g}-{kind[1]}"


def weight_of(shape, kind, seed=0):
    """Stored, random."""
    num_words, book = kind
    marker = None if book == "3inst" else book
    return random_weight(Random(seed, torch.float32), shape, num_words, marker)


def with_scales(weight, suh, svh):
    return QuantTensor(exl3.FORMAT, {**weight.parts, "suh": suh, "svh": svh}, weight.shape)


def exact_rotation(rows, weight, seed=0):
    """x float32 [rows, K] and the weight with other scales, such that x suh and its rotation are
    exact in float32 whatever the order, but for one rounding at the end."""
    r = Random(seed, torch.float32)
    inputs, outputs = len(weight.parts["suh"]), len(weight.parts["svh"])
    suh = 2.0 ** -r.integers(inputs, high=3).float() * (1 - 2 * r.integers(inputs, high=2))
    svh = 2.0 ** -r.integers(outputs, high=2).float() * (1 - 2 * r.integers(outputs, high=2))
    x = (r.integers(rows, weight.shape[1], high=17) - 8).float()
    return x, with_scales(weight, suh.half(), svh.half())


def one_input_each(weight):
    """x float32 [I, I] of which row i, rotated, is `ONE` at input i and zero elsewhere; the weight
    with scales of 1. Both sides of the weight are whole blocks."""
    inputs, outputs = weight.shape[1], weight.shape[0]
    x = (exl3.rotate(torch.eye(inputs, dtype=torch.float64)) * 128**0.5).round().float()
    return x, with_scales(weight, torch.ones(inputs).half(), torch.ones(outputs).half())


ONE = 11.3125  # float16 of sqrt(128)


def inner_from(y):
    """What `one_input_each` shows of the matrix between the rotations: float64 [I, O]."""
    return exl3.rotate(y.double().cpu()) / ONE


def assert_bit_exact(found, inner):
    """float64 [I, O] read back through a float32 rotation is the float16 `inner`: the same bits
    where a float16 is further from its neighbours than that rotation's errors, and those small."""
    inner = inner.double()
    assert float((found - inner).abs().max()) <= 2e-6
    large = inner.abs() >= 2.0**-7
    assert float(large.double().mean()) > 0.9
    assert torch.equal(found[large].half(), inner[large].half())
