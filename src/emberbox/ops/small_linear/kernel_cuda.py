"""Products with a plain matrix of a few hundred rows on a GPU, in one launch."""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.ops.contract import expect, require
from emberbox.ops.launch import TYPES, Program

SOURCE = Path(__file__).with_name("small_linear.cu")
ROWS_PER_BLOCK = 2  # of the weight
VALUES = 8  # of a row that a thread reads at once
ALIGNMENT = 16  # bytes


def small_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] on a CUDA device, each of float32, float16 or bfloat16 -> float32.

    Raises OpError for other types, another width, a width that is not a multiple of 8, or a weight
    with gaps.
    """
    require(x.dtype in TYPES, "small_linear: x is {}, expected one of {}", x.dtype, [*TYPES])
    (num_rows, width), outputs = x.shape, len(weight)
    require(
        weight.shape[1] == width and width % VALUES == 0,
        "small_linear: x has {} channels, the weight {}; expected the same multiple of {}",
        width,
        weight.shape[1],
        VALUES,
    )
    expect("small_linear: weight", weight, (outputs, width), *TYPES)
    x = x.contiguous()
    for name, tensor in (("x", x), ("weight", weight)):
        address = tensor.data_ptr()
        require(address % ALIGNMENT == 0, "small_linear: {} begins at {:#x}", name, address)
    y = torch.empty(num_rows, outputs, dtype=torch.float32, device=x.device)
    if y.numel():
        blocks = -(-outputs // ROWS_PER_BLOCK)
        args = (x, weight, y, num_rows, outputs, width)
        Program(SOURCE, macros_of(x.dtype, weight.dtype, num_rows), x.device).launch(
            "multiply_small", blocks, args
        )
    return y


def macros_of(x: torch.dtype, weight: torch.dtype, num_rows: int) -> tuple[tuple[str, int], ...]:
    """TOKENS: rows of x that a block multiplies at once, as many as registers hold."""
    most = 4 if x is weight is torch.float32 else 8
    tokens = min(most, 1 << (num_rows - 1).bit_length())
    return (("X_TYPE", TYPES[x]), ("W_TYPE", TYPES[weight]), ("TOKENS", tokens))
