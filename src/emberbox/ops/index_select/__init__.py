"""Name the tokens each query attends to (architecture.md 3.4).

scores [T, P], positions [T] int64 -> token indices [T, min(topk / pool, P) * pool + pool - 1]
int64, -1 where there is none: the best complete pools that end at or before the query, then the
incomplete tail, which holds the query unless its pool is just complete. Of equal finite scores the
earlier pools are chosen; in which order those that are chosen stand among themselves is left open.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.index_select.reference import index_select
from emberbox.ops.inputs import Random


def make_inputs(T: int, P: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    positions = torch.arange(T) + max(0, 4 * P + 3 - T)
    return {
        "scores": r.normal(T, P, dtype=torch.float32),
        "positions": positions,
        "pool": 4,
        "topk": 16,
    }


OP = Op(
    name="index_select",
    reference=index_select,
    make_inputs=make_inputs,
    cases=({"T": 1, "P": 1}, {"T": 9, "P": 3}, {"T": 70, "P": 17}),
    tolerance={torch.float32: 0.0},
    kernels={"cpu": Kernel("emberbox.ops.index_select.kernel_cpu:index_select", "cpu")},
)
