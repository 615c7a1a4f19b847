"""Matrix product with an unquantised weight: y = x W^T + b.

x [..., K], weight [N, K], bias [N] or None; y [..., N] in x's dtype.
"""

import torch

from emberbox.ops.contract import Op
from emberbox.ops.inputs import Random
from emberbox.ops.linear.reference import linear


def make_inputs(T: int, N: int, K: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    return {"x": r.normal(T, K), "weight": r.normal(N, K, scale=K**-0.5), "bias": r.normal(N)}


OP = Op(
    name="linear",
    reference=linear,
    make_inputs=make_inputs,
    cases=({"T": 1, "N": 5, "K": 7}, {"T": 3, "N": 130, "K": 129}),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 8e-3},
)
