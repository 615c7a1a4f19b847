"""Products of rotated rows with EXL3 weights on a GPU: one launch for all matrices of one kind."""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.errors import OpError
from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.ops.contract import require
from emberbox.ops.launch import TYPES, Program, settle
from emberbox.ops.linear_exl3.kernel_cuda import MAX_ROWS, ROW_STEP, num_blocks
from emberbox.ops.moe_experts.bank import macros_of
from emberbox.ops.rotated_linear.bank import LinearBank, bank_of
from emberbox.ops.scratch import counters, scratch

SOURCE = Path(__file__).with_name("rotated_linear.cu")


def rotated_linear(
    rotated: Tensor, bank: tuple[Tensor | QuantTensor, ...], dtype: torch.dtype
) -> Tensor:
    """rotated float16 [n, T, I] on a CUDA device -> [T, sum N_i] of float32, float16 or bfloat16.

    More than 16 rows are taken in pieces. Raises OpError for a bank that is none (`bank_of`), other
    types or shapes, or a bank that is elsewhere.
    """
    require(dtype in TYPES, "rotated_linear: {} asked for, expected one of {}", dtype, [*TYPES])
    ready = checked(rotated, bank)
    _, num_rows, _ = rotated.shape
    y = torch.empty(num_rows, ready.outputs, dtype=dtype, device=rotated.device)
    for at in range(0, num_rows, MAX_ROWS):
        _multiply(rotated, ready, y, at, min(MAX_ROWS, num_rows - at))
    return y


def checked(rotated: Tensor, bank: tuple[Tensor | QuantTensor, ...]) -> LinearBank:
    """The bank ready to be multiplied with; made so here, it is waited for: a launch reads weights
    before its turn. Raises OpError as `rotated_linear` does."""
    ready = bank_of(bank)
    if not isinstance(ready, LinearBank):
        raise OpError(
            f"rotated_linear: weights {[_described(weight) for weight in bank]}, expected EXL3 of "
            f"one width, in whole blocks of {exl3.BLOCK}"
        )
    _check(rotated, ready)
    if ready is not bank:
        settle(rotated.device)
    return ready


def program_macros(
    kind: int, num_rows: int, dtype: torch.dtype | None = None
) -> tuple[tuple[str, int], ...]:
    """For up to 16 rows of matrices of a kind (`kind_of`), and results of `dtype` if of any."""
    macros = (*macros_of(kind), ("ROW_TILES", 1 if num_rows <= ROW_STEP else 2))
    return macros if dtype is None else (*macros, ("X_TYPE", TYPES[dtype]))


def _described(weight: Tensor | QuantTensor) -> str:
    name = weight.format.name if isinstance(weight, QuantTensor) else str(weight.dtype)
    return f"{name} {list(weight.shape)}"


def _check(rotated: Tensor, bank: LinearBank) -> None:
    require(
        rotated.dtype is torch.float16 and rotated.is_contiguous(),
        "rotated_linear: rows are {}, expected contiguous float16",
        rotated.dtype,
    )
    shape = list(rotated.shape)
    require(
        len(shape) == 3 and (shape[0], shape[2]) == (len(bank), bank.inputs),
        "rotated_linear: rows {}, expected [{}, T, {}]",
        shape,
        len(bank),
        bank.inputs,
    )
    device = bank[0].device
    require(device == rotated.device, "rotated_linear: {}, bank on {}", rotated.device, device)


def _multiply(rotated: Tensor, bank: LinearBank, y: Tensor, at: int, num_rows: int) -> None:
    """Rows at .. at + num_rows - 1."""
    device, (_, stride, inputs) = rotated.device, rotated.shape
    for launch in bank.launches:
        macros = program_macros(launch.kind, num_rows, y.dtype)
        blocks = num_blocks(inputs // exl3.BLOCK, launch.output_groups, device)
        partial = scratch("partial", 2 * blocks * num_rows * exl3.BLOCK, torch.float32, device)
        arrived = counters(launch.output_groups * num_rows, device)
        sizes = (num_rows, stride, inputs, launch.output_groups, bank.outputs)
        Program(SOURCE, macros, device).launch(
            "multiply_side_by_side",
            blocks,
            (*launch.args, rotated[0, at:], y[at:], partial, arrived, *sizes),
        )
