"""Indexer scores in plain torch."""

import torch
from torch import Tensor


def index_scores(q: Tensor, pooled: Tensor, weights: Tensor) -> Tensor:
    if pooled.dim() == 3:
        own = zip(q, pooled, weights, strict=True)
        return torch.stack([index_scores(*sequence) for sequence in own])
    wide = torch.promote_types(q.dtype, torch.float32)
    D = q.shape[-1]
    match = torch.einsum("thd,pd->thp", q.to(wide), pooled.to(wide)) * D**-0.5
    return torch.einsum("thp,th->tp", torch.relu(match), weights.to(wide))
