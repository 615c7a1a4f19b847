"""Between two sublayers: spread the result of one over the streams, prepare the input of the next.

hyper_update, hyper_mix, rms_norm and the rotation of EXL3 products (ops/rotation.py) in one.
streams [T, S, H], changed in place; ys: up to two tensors [T, H] of its dtype, whose sum, rounded
once, is the sublayer's result (none: streams stay, post and mix are not read); post [T, S] and mix
[T, S, S] (source, destination) float32; fn [(2+S)*S, S*H]; base [(2+S)*S] and scale [3] float32;
norm [H]; suhs: up to three float16 [H]; eps = (rms_norm_eps, hc_eps). Returns x [T, H] in streams'
dtype, rotated float16 [len(suhs), T, H] = rotate(x, suh), and the next post and mix.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.hyper_open.reference import hyper_open
from emberbox.ops.inputs import Random

STREAMS = 4
MAX_RESULTS, MAX_SCALES = 2, 3  # ys, suhs


def make_inputs(
    T: int, H: int, results: int, scales: int, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """results: how many ys; scales: how many suhs."""
    r = Random(seed, dtype)
    S, rows, wide = STREAMS, (2 + STREAMS) * STREAMS, torch.float32
    return {
        "streams": r.normal(T, S, H),
        "ys": tuple(r.normal(T, H) for _ in range(results)),
        "post": r.uniform(T, S, high=2.0),
        "mix": torch.softmax(r.normal(T, S, S, dtype=wide), -1),
        "fn": r.normal(rows, S * H, scale=(S * H) ** -0.5),
        "base": r.normal(rows, dtype=wide),
        "scale": r.normal(3, dtype=wide),
        "norm": r.normal(H),
        "suhs": tuple(r.normal(H, dtype=torch.float16) for _ in range(scales)),
        "eps": (1e-5, 1e-6),
        "iterations": 20,
    }


OP = Op(
    name="hyper_open",
    reference=hyper_open,
    make_inputs=make_inputs,
    cases=(
        {"T": 1, "H": 128, "results": 0, "scales": 3},
        {"T": 3, "H": 384, "results": 1, "scales": 0},
        {"T": 9, "H": 640, "results": 2, "scales": 1},
        {"T": 32, "H": 128, "results": 2, "scales": 2},
    ),
    # float32: a float16 of `rotated` may round the other way; bf16: streams, sum, collapsed and x.
    tolerance={torch.float32: 2e-4, torch.bfloat16: 1e-2},
    updates=("streams",),
    kernels={
        "cuda": Kernel(
            "emberbox.ops.hyper_open.kernel_cuda:hyper_open", "cuda", min_capability=(8, 0)
        )
    },
)
