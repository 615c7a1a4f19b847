"""Before a sublayer: collapse the parallel streams and find how to spread its result again.

Manifold-constrained hyper-connections, architecture.md 3.1. streams [T, S, H]; fn [(2+S)*S, S*H];
base [(2+S)*S] and scale [3] float32; eps = (rms_norm_eps, hc_eps); iterations = hc_sinkhorn_iters.
Returns collapsed [T, H] in streams' dtype, post [T, S] and mix [T, S, S] (source, destination),
both float32 or wider.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.hyper_mix.reference import hyper_mix
from emberbox.ops.inputs import Random


def make_inputs(T: int, S: int, H: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    rows, wide = (2 + S) * S, torch.float32
    return {
        "streams": r.normal(T, S, H, scale=0.01),
        "fn": r.normal(rows, S * H, scale=(S * H) ** -0.5),
        "base": r.normal(rows, dtype=wide),
        "scale": r.normal(3, dtype=wide),
        "eps": (1e-5, 1e-6),
        "iterations": 20,
    }


OP = Op(
    name="hyper_mix",
    reference=hyper_mix,
    make_inputs=make_inputs,
    cases=(
        {"T": 1, "S": 4, "H": 5},
        {"T": 1, "S": 3, "H": 5},
        {"T": 7, "S": 4, "H": 33},
        {"T": 300, "S": 4, "H": 33},
    ),
    tolerance={torch.float32: 5e-6, torch.bfloat16: 4e-3},
    kernels={"cpu": Kernel("emberbox.ops.hyper_mix.kernel_cpu:hyper_mix", "cpu")},
)
