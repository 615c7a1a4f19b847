"""RMS normalisation: y = x / sqrt(mean(x^2) + eps) * weight (architecture.md 3).

x [..., D] any float, weight [D]; computed in float32 or wider, returned in x's dtype.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.rms_norm.reference import rms_norm


def make_inputs(T: int, D: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    return {"x": r.normal(T, D, scale=0.01), "weight": r.normal(D), "eps": 1e-5}


OP = Op(
    name="rms_norm",
    reference=rms_norm,
    make_inputs=make_inputs,
    cases=({"T": 1, "D": 7}, {"T": 5, "D": 128}),
    tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3},  # 4e-3: one bf16 rounding
    kernels={"cpu": Kernel("emberbox.ops.rms_norm.kernel_cpu:rms_norm", "cpu")},
)
