"""Latent attention on a GPU in three launches: queries through W_K, over their rows, through W_V.

A query's rows are divided into runs, so that few queries fill the device; many queries are taken
in pieces. In bfloat16 tensor instructions multiply; float32 is plain and slow.
"""

from math import e, log2
from pathlib import Path

import torch
from torch import Tensor

from emberbox.ops.contract import expect, require
from emberbox.ops.fp8_rows import FP8
from emberbox.ops.launch import STEP_TYPES, TYPES, Macros, Program, num_multiprocessors
from emberbox.ops.mla_decode import MAX_QUERIES
from emberbox.ops.scratch import scratch

PRODUCTS = Path(__file__).with_name("mla_products.cu")
ATTEND = Path(__file__).with_name("mla_attend.cu")
GROUP = 128  # channels of a scale; outputs of a block of `finish`
TILE_HEADS, RUN_STEP, MAX_RUNS = 16, 64, 64
ROWS = (1, 2, 4, 8)  # queries that share a block's weights
BLOCKS_PER_MULTIPROCESSOR = 2
MAX_KEY, MAX_LATENT = 512, 512  # channels: `absorb_8` has KEY x 8 numbers in static shared memory
STATS_BYTES = 3 * TILE_HEADS * 4  # of a block: largest logit, sum, factor


def mla_decode(  # noqa: PLR0913  as the contract says
    q: Tensor,
    kv_b: Tensor,
    latents: Tensor,
    scales: Tensor | None,
    chosen: Tensor,
    num: Tensor,
    suh: Tensor | None,
) -> Tensor:
    """As the contract says; q float32 or bfloat16, everything on one CUDA device.

    Raises OpError for other types and for sizes that the kernels do not take: keys are of up to
    512 channels, latents too.
    """
    _check(q, kv_b, suh)
    _check_rows(q, kv_b.shape[2], (latents, scales), (chosen, num))
    T, outputs = q.shape[0], kv_b.shape[0] * (kv_b.shape[1] - q.shape[1] // kv_b.shape[0])
    out_type = q.dtype if suh is None else torch.float16
    out = torch.empty(T, outputs, dtype=out_type, device=q.device)
    for start in range(0, T, MAX_QUERIES):
        part = slice(start, start + MAX_QUERIES)
        _attend(q[part], kv_b, (latents, scales), (chosen[part], num[part]), (suh, out[part]))
    return out


def product_macros(x_type: torch.dtype, kv_b: Tensor, width: int) -> Macros:
    """Of PRODUCTS for kv_b [H, Dk + Dv, Cl] and queries of `width` = H Dk channels."""
    heads, both, latent = kv_b.shape
    key = width // heads
    sizes = {"HEADS": heads, "KEY": key, "VALUE": both - key, "LATENT": latent}
    return (*sizes.items(), ("X_TYPE", STEP_TYPES[x_type]), ("W_TYPE", TYPES[kv_b.dtype]))


def attend_macros(x_type: torch.dtype, heads: int, latents: Tensor) -> Macros:
    """Of ATTEND for that many heads over rows like `latents` [R, Cl]."""
    sizes = {"HEADS": heads, "LATENT": latents.shape[1]}
    return (*sizes.items(), ("X_TYPE", STEP_TYPES[x_type]), ("FP8", int(latents.dtype is FP8)))


def _attend(
    q: Tensor,
    kv_b: Tensor,
    cache: tuple[Tensor, Tensor | None],
    rows: tuple[Tensor, Tensor],
    result: tuple[Tensor | None, Tensor],
) -> None:
    """cache (latents, scales); rows (chosen, num); result (suh, outputs to write)."""
    T, (H, _, C), K = q.shape[0], kv_b.shape, rows[0].shape[1]
    groups = -(-H // TILE_HEADS)
    runs, run_rows = _runs(T * groups, K, q.device)
    absorbed = scratch("mla absorbed", T * H * C, q.dtype, q.device)
    partial = scratch("mla partial", T * H * runs * C, torch.float32, q.device)
    sums = scratch("mla sums", 2 * T * H * runs, torch.float32, q.device)
    together = min(size for size in ROWS if size >= min(T, ROWS[-1]))
    pieces = -(-T // together)
    scale = float(log2(e) * (q.shape[1] // H) ** -0.5)
    products = Program(PRODUCTS, product_macros(q.dtype, kv_b, q.shape[1]), q.device)
    attend = Program(ATTEND, attend_macros(q.dtype, H, cache[0]), q.device)
    products.launch(f"absorb_{together}", H * (C // GROUP) * pieces, (q, kv_b, absorbed, T, scale))
    attend.launch(
        "attend",
        T * groups * runs,
        (absorbed, *cache, *rows, partial, sums, K, runs, run_rows),
        shared_bytes(C, q.dtype),
    )
    products.launch(
        f"finish_{together}",
        result[1].shape[1] // GROUP * pieces,
        (partial, sums, kv_b, rows[1], *result, T, K, runs, run_rows),
    )


def _runs(tasks: int, K: int, device: torch.device) -> tuple[int, int]:
    """How many runs each query's K rows are divided into, and the rows of one."""
    steps = -(-K // RUN_STEP)
    wanted = -(-BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors(device) // tasks)
    each = -(-steps // min(wanted, steps, MAX_RUNS))
    return -(-steps // each), each * RUN_STEP


def shared_bytes(latent: int, x_type: torch.dtype) -> int:
    """Of a block of `attend`: struct Tile."""
    if x_type is torch.bfloat16:
        rows = 64
        numbers = 2 * ((rows + TILE_HEADS) * (latent + 8) + TILE_HEADS * (rows + 8))
        return numbers + 4 * TILE_HEADS * (rows + 4) + STATS_BYTES
    return 4 * (2 * TILE_HEADS * (latent + 4) + 2 * TILE_HEADS * TILE_HEADS) + STATS_BYTES


def _check(q: Tensor, kv_b: Tensor, suh: Tensor | None) -> None:
    heads, both, latent = kv_b.shape
    key = q.shape[1] // heads
    value = both - key
    require(
        key in range(8, MAX_KEY + 1, 8) and latent in range(GROUP, MAX_LATENT + 1, GROUP),
        "mla_decode: keys of {} and latents of {} channels; the kernels take keys in steps of 8 "
        "up to {} and latents in steps of {} up to {}",
        *(key, latent, MAX_KEY, GROUP, MAX_LATENT),
    )
    require(
        (value == GROUP // 2 or (value > 0 and value % GROUP == 0)) and heads * value % GROUP == 0,
        "mla_decode: {} heads with values of {} channels; the kernels take 64 or whole 128s, and "
        "whole 128s of all heads",
        heads,
        value,
    )
    expect("mla_decode: q", q, (len(q), heads * key), *STEP_TYPES)
    expect("mla_decode: kv_b", kv_b, (heads, both, latent), *TYPES)
    if suh is not None:
        expect("mla_decode: suh", suh, (heads * value,), torch.float16)


def _check_rows(
    q: Tensor, latent: int, cache: tuple[Tensor, Tensor | None], rows: tuple[Tensor, Tensor]
) -> None:
    """latent: channels of one; cache (latents, scales); rows (chosen, num)."""
    (latents, scales), (chosen, num) = cache, rows
    expect("mla_decode: latents", latents, (len(latents), latent), q.dtype, FP8)
    require(
        (scales is not None) == (latents.dtype is FP8),
        "mla_decode: float8 latents need scales, others have none",
    )
    if scales is not None:
        expect("mla_decode: scales", scales, (len(latents), latent // GROUP), torch.float32)
    require(chosen.shape[-1] > 0, "mla_decode: chosen has no column")
    expect("mla_decode: chosen", chosen, (len(q), chosen.shape[-1]), torch.int32)
    expect("mla_decode: num", num, (len(q),), torch.int32)
