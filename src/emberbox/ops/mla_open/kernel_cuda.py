"""A sparse layer's norms, cache rows and pooled keys on a GPU, in one launch.

More tokens of a sequence than the ring has room for, which only prefill brings, take a second one.
"""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.ops.contract import expect, require
from emberbox.ops.fp8_rows import FP8
from emberbox.ops.launch import STEP_TYPES, TYPES, Macros, Program
from emberbox.ops.mla_open.reference import RING

SOURCE = Path(__file__).with_name("mla_open.cu")
GROUP = 128  # channels of a warp, and of an indexer key
MAX_QUERY, MAX_LATENT, MAX_POOL = 2048, 1024, 8
MAX_SUHS = 2
NORMS = ("q_norm", "kv_norm", "weight of k_norm", "bias of k_norm", "ape")
BUT_RING, RING_ONLY, ALL_AT_ONCE = range(3)


def mla_open(  # noqa: PLR0913  as the contract says
    projected: Tensor,
    small: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    k_norm: tuple[Tensor, Tensor],
    ape: Tensor,
    latents: Tensor,
    scales: Tensor | None,
    pooled: Tensor,
    ring_keys: Tensor,
    ring_gates: Tensor,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    eps: tuple[float, float],
    suhs: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """As the contract says; projected float32 or bfloat16, everything on one CUDA device.

    Raises OpError for other types and for sizes that the kernel does not take.
    """
    (T, width), (pool, Di), Rq = projected.shape, ape.shape, q_norm.shape[0]
    Hi, B = small.shape[1] - 2 * Di, rows[0].shape[0]
    norms = (q_norm, kv_norm, *k_norm, ape)
    cache = (latents, scales, pooled, ring_keys, ring_gates)
    _check_sizes(projected, small, Rq, (pool, Di), B)
    _check_inputs(projected, small, norms, rows, suhs)
    _check_cache(projected, cache, (width - Rq, pool))
    q_latent = torch.empty(T, Rq, dtype=projected.dtype, device=projected.device)
    rotated = torch.empty(len(suhs), T, Rq, dtype=torch.float16, device=projected.device)
    weights = torch.empty(T, Hi, dtype=torch.float32, device=projected.device)
    if T:
        types = sum(TYPES[norm.dtype] << 2 * i for i, norm in enumerate(norms))
        outputs = (*suhs, *(None,) * (MAX_SUHS - len(suhs)), q_latent, rotated, weights)
        M = T // B
        sizes = (T, M, rows[3].shape[1], Rq, width - Rq, Hi, pool, *map(float, eps))
        program = Program(
            SOURCE, macros(projected.dtype, latents.dtype, pooled.dtype), projected.device
        )
        is_short = M + pool - 1 <= RING
        for phase in (ALL_AT_ONCE,) if is_short else (BUT_RING, RING_ONLY):
            args = (projected, small, *norms, types, *cache, *rows, *outputs, *sizes, phase)
            program.launch("open_rows", 3 * T, args)
    return q_latent, rotated, weights


def macros(x_type: torch.dtype, latent_type: torch.dtype, pooled_type: torch.dtype) -> Macros:
    """Of the program for activations, latents and pooled keys of those types."""
    types = {"X_TYPE": STEP_TYPES[x_type], "P_TYPE": TYPES[pooled_type]}
    return (*types.items(), ("FP8", int(latent_type is FP8)))


def _check_sizes(projected: Tensor, small: Tensor, Rq: int, ape: tuple[int, int], B: int) -> None:
    (T, width), (pool, Di) = projected.shape, ape
    latent = width - Rq
    require(
        Rq in range(GROUP, MAX_QUERY + 1, GROUP) and latent in range(GROUP, MAX_LATENT + 1, GROUP),
        "mla_open: {} query and {} latent channels; the kernel takes whole 128s up to {} and {}",
        *(Rq, latent, MAX_QUERY, MAX_LATENT),
    )
    require(
        Di == GROUP and pool in (1, 2, 4, MAX_POOL),
        "mla_open: keys of {} channels in pools of {}; the kernel takes 128, and pools of 1, 2, "
        "4 or 8",
        Di,
        pool,
    )
    require(
        T // max(1, B) * B == T and small.shape[1] > 2 * Di,
        "mla_open: {} rows of {} sequences, {} small products; expected whole sequences, more than "
        "{}",
        *(T, B, small.shape[1], 2 * Di),
    )


def _check_cache(
    projected: Tensor,
    cache: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor],
    sizes: tuple[int, int],
) -> None:
    """sizes: channels of a latent, tokens of a pool."""
    (latents, scales, pooled, *ring), (latent, pool), R = cache, sizes, len(cache[0])
    expect("mla_open: latents", latents, (R, latent), projected.dtype, FP8)
    require(
        (scales is not None) == (latents.dtype is FP8),
        "mla_open: float8 latents need scales, others have none",
    )
    if scales is not None:
        expect("mla_open: scales", scales, (R, latent // GROUP), torch.float32)
    expect("mla_open: pooled", pooled, (R // pool, GROUP), *TYPES)
    for name, part in zip(("ring_keys", "ring_gates"), ring, strict=True):
        expect(f"mla_open: {name}", part, (len(ring[0]), RING, GROUP), torch.float32)


def _check_inputs(
    projected: Tensor,
    small: Tensor,
    norms: tuple[Tensor, ...],
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    suhs: tuple[Tensor, ...],
) -> None:
    (T, width), (slots, *_, table), Rq = projected.shape, rows, len(norms[0])
    expect("mla_open: projected", projected, (T, width), *STEP_TYPES)
    expect("mla_open: small", small, (T, small.shape[1]), torch.float32)
    shapes = (Rq,), (width - Rq,), (GROUP,), (GROUP,), norms[4].shape
    for name, norm, shape in zip(NORMS, norms, shapes, strict=True):
        expect(f"mla_open: {name}", norm, shape, *TYPES)
    for name, part in zip(("slots", "positions", "counts"), rows, strict=False):
        expect(f"mla_open: {name}", part, (len(slots),), torch.int32)
    expect("mla_open: table", table, (len(slots), table.shape[-1]), torch.int32)
    require(len(suhs) <= MAX_SUHS, "mla_open: {} rotations, at most {}", len(suhs), MAX_SUHS)
    for suh in suhs:
        expect("mla_open: suh", suh, (Rq,), torch.float16)
