"""Norms of a sparse layer's projections, rows of its cache: composed of the plain references."""

from collections.abc import Iterator

import torch
from torch import Tensor

from emberbox.ops.fp8_rows import quantise_rows
from emberbox.ops.index_pool.reference import index_pool
from emberbox.ops.rms_norm.reference import rms_norm
from emberbox.ops.rotation import rotate

PAGE_TOKENS = 64
RING = 16  # tokens of a slot whose indexer keys are held


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
    Rq, Di = q_norm.shape[0], ape.shape[1]
    q_latent = rms_norm(projected[:, :Rq], q_norm, eps[0])
    fresh = rms_norm(projected[:, Rq:], kv_norm, eps[0])
    weight, bias = (part.to(small.dtype) for part in k_norm)
    keys = torch.nn.functional.layer_norm(small[:, :Di], (Di,), weight, bias, eps[1])
    gates, heads = small[:, Di : 2 * Di], small[:, 2 * Di :]
    for r, slot, position, page in _real(len(projected), rows):
        at = page * PAGE_TOKENS + position % PAGE_TOKENS
        _write(latents, scales, at, fresh[r])
        ring_keys[slot, position % RING] = keys[r]
        ring_gates[slot, position % RING] = gates[r]
        pool = ape.shape[0]
        if (position + 1) % pool == 0:
            held = [token % RING for token in range(position + 1 - pool, position + 1)]
            mean = index_pool(ring_keys[slot, held], ring_gates[slot, held], ape)
            pooled[at // pool] = mean.to(pooled.dtype)
    turned = [rotate(q_latent, suh) for suh in suhs]
    empty = torch.empty(0, *q_latent.shape, dtype=torch.float16, device=q_latent.device)
    return q_latent, torch.stack(turned) if turned else empty, heads * heads.shape[1] ** -0.5


def _real(num_rows: int, rows: tuple[Tensor, ...]) -> Iterator[tuple[int, int, int, int]]:
    """(row, slot, position, page) of the tokens that are no padding, in order."""
    slots, positions, counts, table = (part.tolist() for part in rows)
    for b, (slot, first, count) in enumerate(zip(slots, positions, counts, strict=True)):
        for m in range(count):
            page = table[b][(first + m) // PAGE_TOKENS]
            yield b * (num_rows // len(slots)) + m, slot, first + m, page


def _write(latents: Tensor, scales: Tensor | None, at: int, row: Tensor) -> None:
    if scales is None:
        latents[at] = row
        return
    codes, own = quantise_rows(row.unsqueeze(0))
    latents[at], scales[at] = codes[0].to(latents.dtype), own[0].to(scales.dtype)
