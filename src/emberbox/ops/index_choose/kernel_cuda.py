"""Launches of index_choose.cu: scores of all pools by tensor products, then the best of each row.

How long they take follows the positions on the device, not the width of the table. Rows are taken
in pieces, so that working memory stays bounded.
"""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.ops.contract import require
from emberbox.ops.index_choose.reference import PAGE, Rows
from emberbox.ops.launch import Program, num_multiprocessors
from emberbox.ops.linear_exl3.kernel_cuda import X_TYPES
from emberbox.ops.scratch import scratch

SOURCE = Path(__file__).with_name("index_choose.cu")
DIM = 128
KEY_TYPES = (torch.float32, torch.bfloat16)
HEAD_STEP = 16
MAX_HEADS = 64
PARTS = 3  # of a query, in bf16
CHOOSERS = 1024  # threads of a block of `choose`
BLOCKS_PER_MULTIPROCESSOR = 2
SEQUENCE_BYTES = 12  # of struct Sequence
MAX_SCORES = 1 << 24  # held at a time


def index_choose(
    q: Tensor, weights: Tensor, pooled: Tensor, rows: Rows, pool: int, topk: int
) -> tuple[Tensor, Tensor]:
    """The contract's, on a CUDA device. Raises OpError for shapes and types it does not take."""
    _, positions, counts, table = rows
    _check(q, weights, pooled, rows, pool, topk)
    _check_tensors((q, weights), torch.float32, pooled)
    _check_tensors((positions, counts, table), torch.int32, pooled)
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
    program = Program(SOURCE, (("X_TYPE", X_TYPES[pooled.dtype]),), q.device)
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


def _check(q: Tensor, weights: Tensor, pooled: Tensor, rows: Rows, pool: int, topk: int) -> None:
    _, positions, counts, table = rows
    T, heads = len(q), weights.shape[-1]
    require(
        pooled.dtype in KEY_TYPES and pooled.shape[1:] == (DIM,),
        "index_choose: pooled keys are {} {}, expected float32 or bfloat16 [pools, {}]",
        pooled.dtype,
        list(pooled.shape),
        DIM,
    )
    require(
        q.shape == (T, heads * DIM) and weights.shape == (T, heads),
        "index_choose: queries {} and head weights {}, expected [T, heads * {}] and [T, heads]",
        list(q.shape),
        list(weights.shape),
        DIM,
    )
    require(
        heads in range(HEAD_STEP, MAX_HEADS + 1, HEAD_STEP),
        "index_choose: {} heads, expected a multiple of {} up to {}",
        heads,
        HEAD_STEP,
        MAX_HEADS,
    )
    require(
        PAGE % pool == topk % pool == 0 < topk,
        "index_choose: {} tokens of pools of {}, expected whole pools, in pages of {} too",
        topk,
        pool,
        PAGE,
    )
    B = len(table)
    require(
        positions.shape == counts.shape == (B,) and T // max(1, B) * B == T,
        "index_choose: {} rows, {} positions and {} counts of {} sequences",
        T,
        len(positions),
        len(counts),
        B,
    )


def _check_tensors(tensors: tuple[Tensor, ...], dtype: torch.dtype, pooled: Tensor) -> None:
    require(
        all(tensor.dtype == dtype for tensor in tensors),
        "index_choose: {} where {} was expected",
        [tensor.dtype for tensor in tensors],
        dtype,
    )
    require(
        all(tensor.is_contiguous() and tensor.device == pooled.device for tensor in tensors)
        and pooled.is_contiguous(),
        "index_choose: inputs have to be contiguous and on one device",
    )
