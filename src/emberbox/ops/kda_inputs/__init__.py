"""Normalise q and k and form the log-decay of KDA (architecture.md 3.2).

qkv = (q, k) each [T, H, D]; forget [T, H, D] = W_fb W_fa x; A_log [H], dt_bias [H*D] float32.
  q <- q / sqrt(sum q^2 + 1e-6) * D^-1/2,   k <- k / sqrt(sum k^2 + 1e-6)
  g = lower_bound * sigmoid(exp(A_log) * (forget + dt_bias))     in (lower_bound, 0)
Returns q, k, g, all [T, H, D] in float32 or wider.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.kda_inputs.reference import kda_inputs


def make_inputs(T: int, H: int, D: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    return {
        "qkv": (r.normal(T, H, D, scale=0.01), r.normal(T, H, D, scale=0.01)),
        "forget": r.normal(T, H, D),
        "A_log": r.normal(H, dtype=torch.float32),
        "dt_bias": r.normal(H * D, dtype=torch.float32),
        "lower_bound": -5.0,
    }


OP = Op(
    name="kda_inputs",
    reference=kda_inputs,
    make_inputs=make_inputs,
    cases=({"T": 1, "H": 1, "D": 5}, {"T": 7, "H": 3, "D": 33}),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 2e-6},  # outputs are float32 either way
    kernels={"cpu": Kernel("emberbox.ops.kda_inputs.kernel_cpu:kda_inputs", "cpu")},
)
