"""The product of a few rows with a plain matrix of a few hundred: y = x W^T, in float32.

x [T, K], weight [N, K], each float32, float16 or bfloat16; y [T, N] float32 or wider, products and
sums in float32 or wider. For what is too small or too delicate to be quantised: routers, gates.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.small_linear.reference import small_linear


def make_inputs(T: int, N: int, K: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    return {"x": r.normal(T, K), "weight": r.normal(N, K, scale=K**-0.5)}


OP = Op(
    name="small_linear",
    reference=small_linear,
    make_inputs=make_inputs,
    cases=(
        {"T": 1, "N": 5, "K": 8},
        {"T": 3, "N": 33, "K": 136},
        {"T": 9, "N": 16, "K": 128},
        {"T": 8, "N": 288, "K": 1032},
        {"T": 32, "N": 130, "K": 264},
    ),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 2e-6},
    kernels={
        "cuda": Kernel(
            "emberbox.ops.small_linear.kernel_cuda:small_linear", "cuda", min_capability=(8, 0)
        )
    },
)
