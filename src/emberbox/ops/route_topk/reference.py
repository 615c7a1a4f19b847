"""The router in plain torch."""

import torch
from torch import Tensor


def route_topk(
    x: Tensor, gate: Tensor, bias: Tensor, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return chosen(x.to(wide) @ gate.to(wide).T, bias.to(wide), top_k, scaling)


def chosen(logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """experts int64, by sigmoid(logits) + bias, lower ones first among equals; their weights."""
    scores = torch.sigmoid(logits)
    # The bias decides who is chosen and never enters the weights.
    order = (scores + bias).sort(dim=-1, descending=True, stable=True).indices
    experts = order[:, :top_k].contiguous()
    weights = scores.gather(1, experts)
    return experts, weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling
