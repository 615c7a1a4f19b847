"""silu of a causal depthwise convolution along one sequence (architecture.md 3.2).

x [T, C]; weight [C, W], tap W-1 multiplies the current token; history [W-1, C] the inputs before x
(zeros at the start). Computed in float32 or wider, returned [T, C] in x's dtype.
"""

import torch

from emberbox.ops.contract import Op
from emberbox.ops.inputs import Random
from emberbox.ops.short_conv.reference import short_conv


def make_inputs(T: int, C: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    return {
        "x": r.normal(T, C),
        "weight": r.normal(C, 4, dtype=torch.float32),
        "history": r.normal(3, C),
    }


OP = Op(
    name="short_conv",
    reference=short_conv,
    make_inputs=make_inputs,
    cases=({"T": 1, "C": 3}, {"T": 2, "C": 9}, {"T": 37, "C": 130}),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 4e-3},
)
