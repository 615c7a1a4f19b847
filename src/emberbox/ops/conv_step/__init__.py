"""short_conv for one new token of each of several sequences, whose histories lie in slots.

x [B, C]; weight [C, W]; history [N, W-1, C], oldest input first; slots [B] int64, distinct.
Returns silu of the convolution [B, C] in x's dtype, computed in float32 or wider. Changes
history[slots]: the oldest input makes room for x.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.conv_step.reference import conv_step
from emberbox.ops.inputs import Random


def make_inputs(B: int, C: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    return {
        "x": r.normal(B, C),
        "weight": r.normal(C, 4, dtype=torch.float32),
        "history": r.normal(B + 2, 3, C),
        "slots": torch.randperm(B + 2, generator=r.generator)[:B],
    }


OP = Op(
    name="conv_step",
    reference=conv_step,
    make_inputs=make_inputs,
    cases=({"B": 1, "C": 3}, {"B": 5, "C": 130}),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 4e-3},
    updates=("history",),
    kernels={"cpu": Kernel("emberbox.ops.conv_step.kernel_cpu:conv_step", "cpu")},
)
