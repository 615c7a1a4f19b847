"""Sampling on a GPU in three launches a row, without a sort and without reading anything back.

A number of 64 bits is passed as two of 32.
"""

import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from emberbox.ops.contract import require
from emberbox.ops.launch import STEP_TYPES, THREADS, Program
from emberbox.ops.sample_rows.reference import Changes, Cuts
from emberbox.ops.scratch import counters, scratch

SOURCE = Path(__file__).with_name("sample_rows.cu")
PIECE = 4 * THREADS  # values of a block
MAX_BLOCKS = THREADS
BINS = 2048


def sample_rows(logits: Tensor, uniforms: Sequence[float], cuts: Cuts, changes: Changes) -> Tensor:
    """logits [R, V] on a CUDA device, V below 2^18. Raises OpError for anything else."""
    cuts, changes = Cuts(*cuts), Changes(*changes)
    _check(logits, uniforms, changes)
    num_rows, size = logits.shape
    logits, device = logits.contiguous(), logits.device
    blocks = -(-size // PIECE)
    # Scores, weights and lists; bins, sums and the best of every block (Memory in the .cu file).
    words = blocks * PIECE * 9 // 2 + 2 * BINS + 1 + MAX_BLOCKS * 3 // 2
    memory = scratch("sample", words, torch.int64, device)
    program = Program(SOURCE, (("X_TYPE", STEP_TYPES[logits.dtype]),), device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    penalties = _score_arguments(changes)
    for row, token, uniform in zip(logits, tokens, uniforms, strict=True):
        program.launch("score", blocks, (row, *penalties[:4], memory, size, *penalties[4:]))
        if cuts.temperature == 0:
            program.launch("pick", 1, (memory, token, blocks, size))
            continue
        thresholds = (*_double(cuts.temperature), *_double(cuts.min_p))
        program.launch("weigh", blocks, (memory, size, *thresholds))
        shares = (*_double(cuts.top_p), *_double(uniform))
        arguments = (memory, token, counters(1, device), size, min(cuts.top_k, size), *shares)
        program.launch("draw", blocks, arguments)
    return tokens


def _check(logits: Tensor, uniforms: Sequence[float], changes: Changes) -> None:
    require(
        logits.dim() == 2 and 0 < logits.shape[-1] < MAX_BLOCKS * PIECE,
        "sample_rows: logits are {}, expected [R, V] with V from 1 to {}",
        tuple(logits.shape),
        MAX_BLOCKS * PIECE - 1,
    )
    require(
        logits.dtype in STEP_TYPES,
        "sample_rows: logits are {}, expected one of {}",
        logits.dtype,
        list(STEP_TYPES),
    )
    require(
        len(uniforms) == len(logits),
        "sample_rows: {} uniform numbers for {} rows",
        len(uniforms),
        len(logits),
    )
    wanted = logits.shape[-1:], logits.device
    for name in ("bias", "is_seen", "counts", "is_banned"):
        table = getattr(changes, name)
        dtype = torch.bool if name.startswith("is_") else torch.float64
        require(
            table is None or ((table.shape, table.device), table.dtype) == (wanted, dtype),
            "sample_rows: {} is not a tensor of {} {} on {}",
            name,
            logits.shape[-1],
            dtype,
            logits.device,
        )


def _score_arguments(changes: Changes) -> tuple[object, ...]:
    tables = (changes.bias, changes.is_seen, changes.counts, changes.is_banned)
    return (
        *(None if table is None else table.contiguous() for table in tables),
        *_double(changes.repetition),
        *_double(changes.presence),
        *_double(changes.frequency),
    )


def _double(value: float) -> tuple[int, int]:
    """The low and the high half of its bits."""
    low, high = struct.unpack("<ii", struct.pack("<d", value))
    return low, high
