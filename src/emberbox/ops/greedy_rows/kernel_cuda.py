"""Argmax of rows on a GPU in one launch: blocks take pieces of a row, the last one adds them up."""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.ops.contract import require
from emberbox.ops.launch import STEP_TYPES, THREADS, Program
from emberbox.ops.scratch import counters, scratch

SOURCE = Path(__file__).with_name("greedy_rows.cu")
MAX_ROWS = 32
MOST_BLOCKS = 1024  # of all rows together
LEAST_PIECE = 4 * THREADS  # values of a block


def greedy_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [R, V] float32 or bfloat16 on a CUDA device. Raises OpError for anything else."""
    require(logits.dim() == 2, "greedy_rows: logits are {}, expected [R, V]", logits.shape)
    require(
        logits.dtype in STEP_TYPES,
        "greedy_rows: logits are {}, expected one of {}",
        logits.dtype,
        list(STEP_TYPES),
    )
    num_rows, size = logits.shape
    require(
        num_rows <= MAX_ROWS and size > 0,
        "greedy_rows: logits are {}, expected at most {} rows that are not empty",
        tuple(logits.shape),
        MAX_ROWS,
    )
    logits, device = logits.contiguous(), logits.device
    best = torch.empty(num_rows, dtype=torch.int64, device=device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows:
        pieces = max(1, min(MOST_BLOCKS // num_rows, -(-size // LEAST_PIECE)))
        blocks = num_rows * pieces
        partial = scratch("greedy", blocks, torch.int64, device)
        program = Program(SOURCE, (("X_TYPE", STEP_TYPES[logits.dtype]),), device)
        arrived = counters(num_rows, device)
        program.launch("greedy", blocks, (logits, best, is_finite, partial, arrived, pieces, size))
    return best, is_finite
