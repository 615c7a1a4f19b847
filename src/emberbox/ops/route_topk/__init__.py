"""Choose experts and weigh them (architecture.md 3.5).

x [T, H]; gate [E, H] and bias [E] float32. s = sigmoid(W x) in float32; the top_k largest of
s + bias are chosen; weights are s / (sum of chosen s + 1e-20) * scaling. Returns experts [T, k]
int64 in descending order of s + bias, weights [T, k] float32 or wider.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.route_topk.reference import route_topk


def make_inputs(T: int, E: int, H: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    return {
        "x": r.normal(T, H),
        "gate": r.normal(E, H, scale=H**-0.5, dtype=torch.float32),
        "bias": 10 + 0.1 * r.normal(E, dtype=torch.float32),
        "top_k": 3,
        "scaling": 2.5,
    }


OP = Op(
    name="route_topk",
    reference=route_topk,
    make_inputs=make_inputs,
    cases=({"T": 1, "E": 5, "H": 7}, {"T": 9, "E": 33, "H": 40}),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 2e-6},
    kernels={"cpu": Kernel("emberbox.ops.route_topk.kernel_cpu:route_topk", "cpu")},
)
