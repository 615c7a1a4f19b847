"""Clamped SwiGLU of two halves, rotated for the EXL3 product that reads it.

gate_up [T, 2 I]: the gate, then the up projection. y = swiglu(gate, up, limit) in gate_up's dtype
(ops.swiglu); returns rotate(y, suh), float16 [T, I] (ops.rotation), or y where suh is None.
suh float16 [I], I then in whole Hadamard blocks.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.swiglu_open.reference import swiglu_open


def make_inputs(
    T: int, D: int, rotated: int = 0, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """rotated: 1 for a result that is rotated."""
    r = Random(seed, dtype)
    signs = 1 - 2 * r.integers(D, high=2)
    suh = (r.uniform(D, low=0.5, high=1.5) * signs).half() if rotated else None
    return {"gate_up": r.normal(T, 2 * D, scale=3.0), "limit": 1.5, "suh": suh}


OP = Op(
    name="swiglu_open",
    reference=swiglu_open,
    make_inputs=make_inputs,
    cases=(
        {"T": 1, "D": 3},
        {"T": 5, "D": 130},
        {"T": 1, "D": 128, "rotated": 1},
        {"T": 19, "D": 384, "rotated": 1},
    ),
    # Two results in float16 are equal but where a last bit falls otherwise; bf16: one rounding.
    tolerance={torch.float32: 2e-5, torch.bfloat16: 4e-3},
    kernels={
        "cuda": Kernel(
            "emberbox.ops.swiglu_open.kernel_cuda:swiglu_open", "cuda", min_capability=(8, 0)
        )
    },
)
