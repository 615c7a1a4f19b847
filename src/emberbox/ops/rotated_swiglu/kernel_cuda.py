"""Gate, up, SwiGLU and the rotation on a GPU: one launch where both matrices are of one kind."""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.ops.contract import expect, require
from emberbox.ops.launch import Program
from emberbox.ops.linear_exl3.kernel_cuda import MAX_ROWS, num_blocks
from emberbox.ops.rotated_linear.bank import Launch
from emberbox.ops.rotated_linear.kernel_cuda import checked, program_macros, rotated_linear
from emberbox.ops.scratch import counters, scratch
from emberbox.ops.swiglu_open.kernel_cuda import swiglu_open

SOURCE = Path(__file__).with_name("rotated_swiglu.cu")


def rotated_swiglu(
    rotated: Tensor, bank: tuple[Tensor | QuantTensor, ...], limit: float, suh: Tensor
) -> Tensor:
    """rotated float16 [2, T, I] on a CUDA device -> float16 [T, W].

    More than 16 rows are taken in pieces. Raises OpError as `rotated_linear` does, and for matrices
    of two shapes or a suh of another.
    """
    ready = checked(rotated, bank)
    shapes = [weight.shape for weight in ready]
    width = shapes[0][0]
    require(
        len(shapes) == 2 and shapes[0] == shapes[1],
        "rotated_swiglu: matrices {}, expected two of one shape [W, I]",
        shapes,
    )
    expect("rotated_swiglu: suh", suh, (width,), torch.float16)
    if len(ready.launches) > 1:
        return swiglu_open(rotated_linear(rotated, ready, torch.float32), limit, suh)
    num_rows = rotated.shape[1]
    out = torch.empty(num_rows, width, dtype=torch.float16, device=rotated.device)
    for at in range(0, num_rows, MAX_ROWS):
        rows = min(MAX_ROWS, num_rows - at)
        _multiply(ready.launches[0], rotated, out, (at, rows), (suh, float(limit)))
    return out


def _multiply(
    launch: Launch,
    rotated: Tensor,
    out: Tensor,
    span: tuple[int, int],
    activation: tuple[Tensor, float],
) -> None:
    """span: first row, number of rows; activation: suh, limit."""
    device, (_, stride, inputs), width = rotated.device, rotated.shape, out.shape[1]
    (at, rows), (suh, limit) = span, activation
    groups = width // exl3.BLOCK
    blocks = num_blocks(inputs // exl3.BLOCK, 2 * groups, device)
    partial = scratch("partial", 2 * blocks * rows * exl3.BLOCK, torch.float32, device)
    pairs = scratch("pairs", 2 * rows * width, torch.float32, device)
    arrived = counters(3 * groups * rows, device)
    sizes = (rows, stride, inputs, groups)
    matrices = (*launch.args[:2], *launch.args[5:7])
    program = Program(SOURCE, program_macros(launch.kind, rows), device)
    program.launch(
        "multiply_gate_up",
        blocks,
        (*matrices, suh, rotated[0, at:], out[at:], pairs, partial, arrived, *sizes, limit),
    )
