"""The selection of tokens for a few queries: topk in torch, the rest on NumPy views."""

import numpy as np
import torch
from torch import Tensor

from emberbox.ops.arrays import is_small
from emberbox.ops.index_select.reference import index_select as reference


def index_select(scores: Tensor, positions: Tensor, pool: int, topk: int) -> Tensor:
    if not is_small(scores):
        return reference(scores, positions, pool, topk)
    T, P = scores.shape
    at = positions.numpy()[:, None]
    num_complete = (at + 1) // pool  # [T, 1] pools that end at or before t
    candidates = np.where(np.arange(P) < num_complete, scores.numpy(), np.float32("-inf"))
    best = torch.from_numpy(candidates).topk(min(topk // pool, P), dim=-1).indices.numpy()
    tokens = best[:, :, None] * pool + np.arange(pool)
    tokens[best >= num_complete] = -1
    tail = num_complete * pool + np.arange(pool - 1)
    tail[tail > at] = -1
    return torch.from_numpy(np.concatenate((tokens.reshape(T, -1), tail), axis=1))
