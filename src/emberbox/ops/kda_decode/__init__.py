"""A whole KDA layer between its products, for M tokens each of B sequences with a past.

Row b M + m of T = B M is token m of sequence b; C = 3 H D, D = 128. A: the activations' dtype.
  inputs    qkv [T, C] A; small [T, 2 R + H] float32: x times W_fa, W_ga, W_b, side by side
  weights   f_b, g_b [H D, R]; conv [C, 4]; A_log [H]; dt_bias [H D]; o_norm [D]; suh [H D] or None
  cache     history [N, 3, C] A, states [N, H, D, D] float32, both updated
  pending   conv [T, C] A, k, gate, deltas [T, H, D] float32, all updated
  rows      slots [B], counts [B] int32: the first counts[b] tokens of b are real, the rest padding
  constants gate_lower_bound, eps of o_norm
Token 0 changes history and state of slots[b]; what kda_apply needs of the other real tokens goes to
their rows of `pending`; nothing else is written. Returns what o_proj is given, [T, H D] in A; with
suh in float16, as rotation.rotate(x, suh). Rows of padding come out as zero. Slots of sequences
with real tokens are distinct. Roundings to A are those of the layer done op by op.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.kda_decode.reference import kda_decode

D = 128


def make_inputs(
    B: int, M: int, H: int, R: int, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """Sequences have M, M - 1, .. 0, M, .. real tokens; the result is rotated where H is even."""
    r, T, C, wide = Random(seed, dtype), B * M, 3 * H * D, torch.float32
    suh = r.uniform(H * D, low=0.5, high=1.5).half() * (1 - 2 * r.integers(H * D, high=2)).half()
    return {
        "inputs": (r.normal(T, C), r.normal(T, 2 * R + H, dtype=wide)),
        "weights": (
            r.normal(H * D, R, scale=R**-0.5),
            r.normal(H * D, R, scale=R**-0.5),
            r.normal(C, 4, scale=0.5, dtype=wide),
            r.normal(H, scale=0.3, dtype=wide),
            r.normal(H * D, scale=0.3, dtype=wide),
            r.normal(D, dtype=wide),
            None if H % 2 else suh,
        ),
        "cache": (r.normal(B + 2, 3, C), r.normal(B + 2, H, D, D, scale=0.3, dtype=wide)),
        "pending": (r.normal(T, C), *(r.normal(T, H, D, dtype=wide) for _ in range(3))),
        "rows": (
            torch.randperm(B + 2, generator=r.generator)[:B].int(),
            torch.tensor([M - b % (M + 1) for b in range(B)], dtype=torch.int32),
        ),
        "constants": (-5.0, 1e-5),
    }


OP = Op(
    name="kda_decode",
    reference=kda_decode,
    make_inputs=make_inputs,
    cases=(
        {"B": 1, "M": 1, "H": 1, "R": 8},
        {"B": 3, "M": 1, "H": 2, "R": 128},
        {"B": 5, "M": 3, "H": 3, "R": 40},
        {"B": 2, "M": 8, "H": 2, "R": 136},
    ),
    tolerance={torch.float32: 1e-4, torch.bfloat16: 8e-3},
    updates=("cache", "pending"),
    kernels={
        "cuda": Kernel(
            "emberbox.ops.kda_decode.kernel_cuda:kda_decode",
            "cuda",
            min_capability=(8, 0),
            ready="emberbox.ops.kda_decode.kernel_cuda:ready_weights",
        )
    },
)
