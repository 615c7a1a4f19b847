"""Verify 1..8 tokens without touching the state; keep the factors that a commit needs.

Inputs as kda_chunk with T >= 1. Returns o [T, H, Dv] and deltas [T, H, Dv], float32 or wider. The
op kda_commit turns the deltas of accepted tokens into the next state (architecture.md 3.2).
"""

import torch

from emberbox.ops import kda_chunk
from emberbox.ops.contract import Op
from emberbox.ops.kda_verify.reference import kda_verify

OP = Op(
    name="kda_verify",
    reference=kda_verify,
    make_inputs=kda_chunk.make_inputs,
    cases=({"T": 1, "H": 1, "D": 8}, {"T": 8, "H": 3, "D": 32}),
    tolerance={torch.float32: 5e-6, torch.bfloat16: 5e-6},
)
