"""The selection of tokens in plain torch."""

import torch
from torch import Tensor


def index_select(scores: Tensor, positions: Tensor, pool: int, topk: int) -> Tensor:
    P = scores.shape[1]
    num_complete = (positions + 1).div(pool, rounding_mode="floor")  # pools that end at or before t
    candidate = torch.arange(P, device=scores.device) < num_complete.unsqueeze(-1)
    best = min(topk // pool, P)
    ranked = scores.masked_fill(~candidate, float("-inf")).sort(descending=True, stable=True)
    chosen = ranked.indices[:, :best]  # [T, best]
    offsets = torch.arange(pool, device=scores.device)
    tokens = (chosen.unsqueeze(-1) * pool + offsets).flatten(1)
    kept = candidate.gather(1, chosen).repeat_interleave(pool, dim=1)
    tail = num_complete.unsqueeze(-1) * pool + offsets[: pool - 1]
    return torch.cat(
        [tokens.masked_fill(~kept, -1), tail.masked_fill(tail > positions.unsqueeze(-1), -1)], dim=1
    )
