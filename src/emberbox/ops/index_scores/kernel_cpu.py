"""Indexer scores as two matrix products, for one sequence or several."""

import torch
from torch import Tensor


def index_scores(q: Tensor, pooled: Tensor, weights: Tensor) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scaled = (q.to(wide) * q.shape[-1] ** -0.5).flatten(-3, -2)  # [..., T * Hi, D]
    match = (scaled @ pooled.to(wide).mT).relu_()  # [..., T * Hi, P]
    match = match.view(*q.shape[:-1], pooled.shape[-2])  # [..., T, Hi, P]
    scores: Tensor = weights.to(wide).unsqueeze(-2) @ match
    return scores.squeeze(-2)
