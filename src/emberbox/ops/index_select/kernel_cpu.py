"""The selection of tokens on a CPU: topk in torch, repaired where scores at its border are equal;
of a few queries the rest on NumPy views.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberbox.ops.arrays import is_small

Whole = NDArray[np.int64]


def index_select(scores: Tensor, positions: Tensor, pool: int, topk: int) -> Tensor:
    P = scores.shape[1]
    at = positions[:, None]
    num_complete = (at + 1) // pool  # [T, 1] pools that end at or before t
    if is_small(scores):
        is_candidate = torch.from_numpy(np.arange(P) < num_complete.numpy())
    else:
        is_candidate = torch.arange(P) < num_complete
    best = _best(scores.masked_fill(~is_candidate, float("-inf")), min(topk // pool, P))
    return _tokens(best.numpy(), num_complete.numpy(), at.numpy(), pool)


def _best(scores: Tensor, num: int) -> Tensor:
    """[T, P] -> [T, num], of equal scores the lower ones. topk alone takes any of them."""
    found = scores.topk(num, dim=-1)
    least = found.values[:, -1:]
    is_least = (scores == least) & (least > float("-inf"))
    rows = is_least.sum(-1) > (found.values == least).sum(-1)
    if rows.any():
        ranked = scores[rows].sort(descending=True, stable=True)
        found.indices[rows] = ranked.indices[:, :num]
    return found.indices


def _tokens(best: Whole, num_complete: Whole, at: Whole, pool: int) -> Tensor:
    tokens = best[:, :, None] * pool + np.arange(pool)
    tokens[best >= num_complete] = -1
    tail = num_complete * pool + np.arange(pool - 1)
    tail[tail > at] = -1
    return torch.from_numpy(
        np.concatenate((tokens.reshape(len(best), best.shape[1] * pool), tail), axis=1)
    )
