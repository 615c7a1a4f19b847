"""Clamped SwiGLU: silu(min(gate, limit)) * clamp(up, -limit, limit) (architecture.md 3.5).

gate, up [..., I] of one dtype; computed in float32 or wider, returned in gate's dtype.
"""

import torch

from emberbox.ops.contract import Op
from emberbox.ops.inputs import Random
from emberbox.ops.swiglu.reference import swiglu


def make_inputs(T: int, D: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    return {"gate": r.normal(T, D, scale=3.0), "up": r.normal(T, D, scale=3.0), "limit": 1.5}


OP = Op(
    name="swiglu",
    reference=swiglu,
    make_inputs=make_inputs,
    cases=({"T": 1, "D": 3}, {"T": 5, "D": 130}),
    tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3},  # 4e-3: one bf16 rounding
)
