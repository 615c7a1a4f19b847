"""Score pools for each query and name the tokens it attends to (architecture.md 3.4).

index_scores: q [T, Hi, D], pooled [P, D], weights [T, Hi] (already times Hi^-1/2, may be negative)
  -> score(t, p) = sum_h w_h relu(q_h . K_p D^-1/2), [T, P] float32 or wider.
index_select: scores [T, P], positions [T] int64 -> token indices [T, min(topk/pool, P)*pool +
pool-1]
  int64, -1 where there is none: the best complete pools that end at or before the query, then the
  incomplete tail, which holds the query unless its pool is just complete. Ties fall as
  torch.topk does.
"""

import torch

from emberbox.ops.contract import Op
from emberbox.ops.index_select.reference import index_scores, index_select
from emberbox.ops.inputs import Random

__all__ = ["OP", "SCORES", "index_scores", "index_select"]


def make_inputs(T: int, P: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    positions = torch.arange(T) + max(0, 4 * P + 3 - T)
    return {
        "scores": r.normal(T, P, dtype=torch.float32),
        "positions": positions,
        "pool": 4,
        "topk": 16,
    }


def make_score_inputs(T: int, P: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    return {"q": r.normal(T, 5, 16), "pooled": r.normal(P, 16), "weights": r.normal(T, 5)}


OP = Op(
    name="index_select",
    reference=index_select,
    make_inputs=make_inputs,
    cases=({"T": 1, "P": 1}, {"T": 9, "P": 3}, {"T": 70, "P": 17}),
    tolerance={torch.float32: 0.0},
)

SCORES = Op(
    name="index_scores",
    reference=index_scores,
    make_inputs=make_score_inputs,
    cases=({"T": 1, "P": 1}, {"T": 7, "P": 19}),
    tolerance={torch.float32: 5e-6, torch.bfloat16: 5e-6},
)
