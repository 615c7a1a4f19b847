"""A sparse layer's norms, cache rows and pooled keys on a GPU, in one launch.

More tokens of a sequence than the ring has room for, which only prefill brings, take a second one.
"""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.ops.contract import require
from emberbox.ops.launch import Macros, Program
from emberbox.ops.mla_open.reference import PAGE_TOKENS, RING

SOURCE = Path(__file__).with_name("mla_open.cu")
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
X_TYPES = {torch.float32: 0, torch.bfloat16: 2}
FP8 = torch.float8_e4m3fn
GROUP = 128  # channels of a warp, and of an indexer key
MAX_QUERY, MAX_LATENT, MAX_POOL = 2048, 1024, 8
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
    _check_types(projected, small, cache, norms)
    _check_sizes(projected, Rq, (pool, Di), B, len(suhs))
    for part in (projected, small, *norms, *rows, *suhs, *(p for p in cache if p is not None)):
        require(part.is_contiguous(), "mla_open: a tensor of {} is not contiguous", part.shape)
    q_latent = torch.empty(T, Rq, dtype=projected.dtype, device=projected.device)
    rotated = torch.empty(len(suhs), T, Rq, dtype=torch.float16, device=projected.device)
    weights = torch.empty(T, Hi, dtype=torch.float32, device=projected.device)
    if T:
        types = sum(TYPES[norm.dtype] << 2 * i for i, norm in enumerate(norms))
        outputs = (*suhs, *(None,) * (2 - len(suhs)), q_latent, rotated, weights)
        M = T // B
        sizes = (T, M, rows[3].shape[1], Rq, width - Rq, Hi, pool, *eps)
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
    types = {"X_TYPE": X_TYPES[x_type], "P_TYPE": TYPES[pooled_type]}
    return (*types.items(), ("FP8", int(latent_type is FP8)))


def _check_types(
    projected: Tensor,
    small: Tensor,
    cache: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor],
    norms: tuple[Tensor, ...],
) -> None:
    latents, scales, pooled, *ring = cache
    require(
        projected.dtype in X_TYPES and latents.dtype in (projected.dtype, FP8),
        "mla_open: projected is {}, latents {}; expected float32 or bfloat16, latents as that or "
        "float8_e4m3fn",
        projected.dtype,
        latents.dtype,
    )
    require(
        (scales is not None) == (latents.dtype is FP8),
        "mla_open: float8 latents need scales, others have none",
    )
    require(
        all(part.dtype is torch.float32 for part in (small, *ring)),
        "mla_open: small products and the ring must be float32",
    )
    require(
        all(part.dtype in TYPES for part in (pooled, *norms)),
        "mla_open: pooled keys and norms must be one of {}",
        list(TYPES),
    )


def _check_sizes(projected: Tensor, Rq: int, ape: tuple[int, int], B: int, num_suhs: int) -> None:
    latent, (pool, Di) = projected.shape[1] - Rq, ape
    require(
        Rq % GROUP == 0 and Rq <= MAX_QUERY and latent % GROUP == 0 and latent <= MAX_LATENT,
        "mla_open: {} query and {} latent channels; the kernel takes whole 128s up to {} and {}",
        Rq,
        latent,
        MAX_QUERY,
        MAX_LATENT,
    )
    require(
        Di == GROUP and PAGE_TOKENS % pool == 0 and pool <= MAX_POOL,
        "mla_open: keys of {} channels in pools of {}; the kernel takes 128, and pools of 1, 2, "
        "4 or 8",
        Di,
        pool,
    )
    require(
        projected.shape[0] % B == 0 and num_suhs <= 2,
        "mla_open: {} rows of {} sequences, {} rotations; expected whole sequences, at most 2",
        projected.shape[0],
        B,
        num_suhs,
    )
