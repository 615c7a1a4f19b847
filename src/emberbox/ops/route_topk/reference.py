"""The router in plain torch."""

import torch
from torch import Tensor


def route_topk(
    x: Tensor, gate: Tensor, bias: Tensor, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = torch.sigmoid(x.to(wide) @ gate.to(wide).T)
    # The bias decides who is chosen and never enters the weights.
    experts = (scores + bias.to(wide)).topk(top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    return experts, weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling
