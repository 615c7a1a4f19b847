"""kda_chunk for one new token of each of several sequences, whose states lie in slots.

qkv = (q, k, v): q, k [B, H, Dk] float32, v [B, H, Dv]; gate [B, H, Dk] float32, beta [B, H];
states [N, H, Dk, Dv] float32; slots [B] int64, distinct. Returns o [B, H, Dv] in float32 or wider.
Changes states[slots] to those after the token (architecture.md 3.2).
"""

import torch

from emberbox.ops import kda_chunk
from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.kda_step.reference import kda_step


def make_inputs(B: int, H: int, D: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, torch.float32)
    inputs = kda_chunk.make_inputs(B, H, D, dtype=dtype, seed=seed)
    return {
        "qkv": (inputs["q"], inputs["k"], inputs["v"]),
        "gate": inputs["gate"],
        "beta": inputs["beta"],
        "states": r.normal(B + 2, H, D, D, scale=0.3),
        "slots": torch.randperm(B + 2, generator=r.generator)[:B],
    }


OP = Op(
    name="kda_step",
    reference=kda_step,
    make_inputs=make_inputs,
    cases=({"B": 1, "H": 1, "D": 8}, {"B": 5, "H": 3, "D": 33}),
    tolerance={torch.float32: 5e-6, torch.bfloat16: 5e-6},  # float32 inside either way
    updates=("states",),
    kernels={"cpu": Kernel("emberbox.ops.kda_step.kernel_cpu:kda_step", "cpu")},
)
