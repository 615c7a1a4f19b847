"""The choice of latent rows in plain torch, one row after another."""

import torch
from torch import Tensor

PAGE = 64  # tokens
Rows = tuple[Tensor, Tensor, Tensor, Tensor]


def index_choose(
    q: Tensor, weights: Tensor, pooled: Tensor, rows: Rows, pool: int, topk: int
) -> tuple[Tensor, Tensor]:
    _, positions, counts, table = rows
    M = len(q) // max(1, len(table))
    chosen = torch.full((len(q), topk + pool - 1), -1, dtype=torch.int32, device=q.device)
    num = torch.zeros(len(q), dtype=torch.int32, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide).reshape(len(q), *weights.shape[1:], pooled.shape[1])  # [T, Hi, D]
    for b, (position, count) in enumerate(zip(positions.tolist(), counts.tolist(), strict=True)):
        if count == 0:
            continue
        num_pools = (position + count) // pool  # complete after the last of the real tokens
        keys = pooled[_places(table[b], torch.arange(num_pools, device=q.device), PAGE // pool)]
        for m in range(count):
            t, end = b * M + m, position + m + 1
            best = _best(queries[t], weights[t], keys[: end // pool], topk // pool)
            tokens = (best.unsqueeze(1) * pool + torch.arange(pool, device=q.device)).flatten()
            tail = torch.arange(end // pool * pool, end, device=q.device)
            found = _places(table[b], torch.cat([tokens, tail]), PAGE)
            chosen[t, : len(found)], num[t] = found.to(torch.int32), len(found)
    return chosen, num


def _best(q: Tensor, weights: Tensor, keys: Tensor, most: int) -> Tensor:
    """q [Hi, D], weights [Hi], keys [P, D] -> ascending numbers of the `most` best keys."""
    if len(keys) <= most:
        return torch.arange(len(keys), device=keys.device)
    # Without D^-1/2, which every score has: a positive factor changes the choice only by rounding.
    scores = weights.to(q.dtype) @ torch.relu(q @ keys.to(q.dtype).mT)
    return scores.sort(descending=True, stable=True).indices[:most].sort().values


def _places(pages: Tensor, numbers: Tensor, size: int) -> Tensor:
    """Where tokens or pools of a sequence lie, if a page holds `size` of them."""
    return pages.long()[numbers // size] * size + numbers % size
