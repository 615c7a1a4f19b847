"""Full attention within segments, q and k normalised per head, then rotated (architecture.md 5).

qkv [P, 3, H, D] any float (query, key, value of each patch); q_weight, k_weight [D]; angles
[P, D/2] float32 or wider, radians, one per pair (i, i + D/2) of a head; lengths: patches of each
segment, they add up to P and no patch sees another segment.
Per head: q = rotate(rmsnorm(q) q_weight), k alike, softmax(q k^T D^-1/2) v.
Returns [P, H, D] in qkv's dtype; norm, rotation and softmax in float32 or wider.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.vision_attention.reference import vision_attention


def make_inputs(
    first: int, second: int, H: int, D: int, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """Two segments of `first` and `second` patches; small q and k, so that the epsilon counts."""
    r = Random(seed, dtype)
    P = first + second
    qkv = r.normal(P, 3, H, D)
    qkv[:, :2] *= 0.01
    return {
        "qkv": qkv,
        "q_weight": r.normal(D),
        "k_weight": r.normal(D),
        "angles": r.uniform(P, D // 2, low=-40.0, high=40.0),
        "lengths": (first, second),
        "eps": 1e-5,
    }


SDPA = "emberbox.ops.vision_attention.kernel_sdpa:vision_attention"

OP = Op(
    name="vision_attention",
    reference=vision_attention,
    make_inputs=make_inputs,
    cases=(
        {"first": 1, "second": 3, "H": 1, "D": 4},
        {"first": 20, "second": 7, "H": 3, "D": 12},
        {"first": 5, "second": 70, "H": 2, "D": 64},
    ),
    tolerance={
        torch.float32: 2e-6,
        torch.bfloat16: 5e-3,  # rounding q and k before their product, then the output
    },
    kernels={"sdpa_cpu": Kernel(SDPA, "cpu"), "sdpa_cuda": Kernel(SDPA, "cuda")},
)
