"""Score each pool for each query: score(t, p) = sum_h w_h relu(q_h . K_p D^-1/2).

Architecture.md 3.4. q [T, Hi, D], pooled [P, D], weights [T, Hi], already times Hi^-1/2 and maybe
negative; returns [T, P] float32 or wider. All may have B sequences as their first dimension.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.index_scores.reference import index_scores
from emberbox.ops.inputs import Random


def make_inputs(
    T: int, P: int, B: int = 0, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    r = Random(seed, dtype)
    many = (B,) if B else ()
    return {
        "q": r.normal(*many, T, 5, 16),
        "pooled": r.normal(*many, P, 16),
        "weights": r.normal(*many, T, 5),
    }


OP = Op(
    name="index_scores",
    reference=index_scores,
    make_inputs=make_inputs,
    cases=({"T": 1, "P": 1}, {"T": 3, "P": 0}, {"T": 7, "P": 19}, {"T": 2, "P": 19, "B": 3}),
    tolerance={torch.float32: 5e-6, torch.bfloat16: 5e-6},
    kernels={"cpu": Kernel("emberbox.ops.index_scores.kernel_cpu:index_scores", "cpu")},
)
