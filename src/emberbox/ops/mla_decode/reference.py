"""Latent attention of each query over its own rows, in plain torch."""

import torch
from torch import Tensor

from emberbox.ops.fp8_rows import dequantise_rows
from emberbox.ops.mla_attention.reference import mla_attention
from emberbox.ops.rotation import rotate


def mla_decode(  # noqa: PLR0913  as the contract says
    q: Tensor,
    kv_b: Tensor,
    latents: Tensor,
    scales: Tensor | None,
    chosen: Tensor,
    num: Tensor,
    suh: Tensor | None,
) -> Tensor:
    if not len(q):
        width = kv_b.shape[:2].numel() - q.shape[1]
        return q.new_empty(0, width, dtype=q.dtype if suh is None else torch.float16)
    is_there = torch.arange(chosen.shape[1], device=chosen.device) < num.unsqueeze(1)
    at = torch.where(is_there, chosen, 0).long()
    is_used = torch.zeros(len(latents), dtype=torch.bool, device=at.device)
    is_used[at[is_there]] = True
    held, places = is_used.nonzero().flatten(), is_used.cumsum(0) - 1
    rows = latents[held] if scales is None else dequantise_rows(latents[held], scales[held])
    indices = places[at].masked_fill(~is_there, -1)
    out = mla_attention(q.view(len(q), kv_b.shape[0], -1), rows, kv_b, indices).flatten(1)
    out = out.masked_fill((num == 0).unsqueeze(1), 0.0)
    return out if suh is None else rotate(out, suh)
