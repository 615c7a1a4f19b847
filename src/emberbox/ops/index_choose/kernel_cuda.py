"""Launches of index_choose.cu: scores of all pools by tensor products, then the best of each row.

How long they take follows the positions on the device, not the width of the table. Rows are taken
in pieces, so that working memory stays bounded.
"""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.ops.contract import expect, require
from emberbox.ops.index_choose import MAX_SCORES
from emberbox.ops.index_choose.reference import PAGE, Rows
from emberbox.ops.launch import STEP_TYPES, Program, num_multiprocessors
from emberbox.ops.scratch import scratch

SOURCE = Path(__file__).with_name("index_choose.cu")
DIM = 128
HEAD_STEP = 16
MAX_HEADS = 64
PARTS = 3  # of a query, in bf16
CHOOSERS = 1024  # threads of a block of `choose`
BLOCKS_PER_MULTIPROCESSOR = 2
SEQUENCE_BYTES = 12  # of struct Sequence
SCORE_STEP = 4  # that `choose` reads at once: a page holds whole steps of pools


def index_choose(
    q: Tensor, weights: Tensor, pooled: Tensor, rows: Rows, pool: int, topk: int
) -> tuple[Tensor, Tensor]:
    """The contract's, on a CUDA device. Raises OpError for shapes and types it does not take."""
    _, positions, counts, table = rows
    _check(q, weights, rows, pool, topk)
    _check_tensors(q, weights, pooled, rows)
    chosen = torch.empty(len(q), topk + pool - 1, dtype=torch.int32, device=q.device)
    num = torch.empty(len(q), dtype=torch.int32, device=q.device)
    if not len(q):
        return chosen, num
    B, P = table.shape
    M, heads, best = len(q) // B, weights.shape[1], topk // pool
    stride = P * (PAGE // pool)  # scores of a row
    has_scores = stride > best
    at_once = min(M, max(1, MAX_SCORES // (B * stride))) if has_scores else M
    num_keys = B * at_once * stride if has_scores else 0
    keys = scratch("index keys", num_keys, torch.int32, q.device)
    program = Program(SOURCE, (("X_TYPE", STEP_TYPES[pooled.dtype]),), q.device)
    program.load("score", "choose")
    where = (positions, counts, table)
    for first in range(0, M, at_once):
        piece = min(at_once, M - first)
        sizes = (B, M, first, piece, P, stride, pool, best)
        if has_scores:
            program.launch(
                "score",
                BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors(q.device),
                (q, weights, pooled, *where, keys, *sizes, heads),
                heads * (PARTS * DIM * 2 + 4) + SEQUENCE_BYTES * B,
            )
        program.launch("choose", B * piece, (keys, *where, chosen, num, *sizes), threads=CHOOSERS)
    return chosen, num


def _check(q: Tensor, weights: Tensor, rows: Rows, pool: int, topk: int) -> None:
    T, heads, B = len(q), weights.shape[-1], len(rows[3])
    require(
        heads in range(HEAD_STEP, MAX_HEADS + 1, HEAD_STEP),
        "index_choose: {} heads, expected a multiple of {} up to {}",
        heads,
        HEAD_STEP,
        MAX_HEADS,
    )
    require(
        PAGE % (SCORE_STEP * pool) == topk % pool == 0 < topk,
        "index_choose: {} tokens of pools of {}, expected whole pools of 1, 2, 4, 8 or 16",
        topk,
        pool,
    )
    require(T // max(1, B) * B == T, "index_choose: {} rows of {} sequences", T, B)


def _check_tensors(q: Tensor, weights: Tensor, pooled: Tensor, rows: Rows) -> None:
    (_, positions, counts, table), (T, heads) = rows, weights.shape
    expect("index_choose: pooled", pooled, (len(pooled), DIM), *STEP_TYPES)
    expect("index_choose: q", q, (T, heads * DIM), torch.float32)
    expect("index_choose: weights", weights, (len(q), heads), torch.float32)
    expect("index_choose: table", table, (len(table), table.shape[-1]), torch.int32)
    for name, part in (("positions", positions), ("counts", counts)):
        expect(f"index_choose: {name}", part, (len(table),), torch.int32)
    devices = {part.device for part in (q, weights, pooled, positions, counts, table)}
    require(len(devices) == 1, "index_choose: inputs are on {}, expected one device", devices)
