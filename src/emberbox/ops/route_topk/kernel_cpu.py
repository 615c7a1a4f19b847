"""The router for a few tokens: the product in torch, the rest on NumPy views."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from emberbox.ops.arrays import is_small
from emberbox.ops.route_topk.reference import route_topk as reference


def route_topk(
    x: Tensor, gate: Tensor, bias: Tensor, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    if not is_small(x, gate, bias):
        return reference(x, gate, bias, top_k, scaling)
    scores = torch.sigmoid(linear(x, gate))
    # The bias decides who is chosen and never enters the weights.
    experts = (scores + bias).topk(top_k, dim=-1).indices
    weights = scores.numpy()[np.arange(x.shape[0])[:, None], experts.numpy()]
    weights *= scaling / (np.add.reduce(weights, axis=-1, keepdims=True) + 1e-20)
    return experts, torch.from_numpy(weights)
