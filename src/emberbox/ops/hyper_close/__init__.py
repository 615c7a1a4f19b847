"""After the last sublayer: spread its result, average the streams, norm, prepare the products.

hyper_update, the plain mean over streams (rounded), rms_norm and the rotation of EXL3 products in
one. Inputs as hyper_open's, eps of the norm alone; streams are read only. Returns hidden [T, H] in
streams' dtype and rotated float16 [len(suhs), T, H] = rotate(hidden, suh).
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.hyper_close.reference import hyper_close
from emberbox.ops.hyper_open import make_inputs as inputs_of_open

TAKEN = ("streams", "ys", "post", "mix", "norm", "suhs")  # of what hyper_open takes


def make_inputs(
    T: int, H: int, results: int, scales: int, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """results: how many ys; scales: how many suhs."""
    given = inputs_of_open(T, H, results, scales, dtype=dtype, seed=seed)
    return {name: given[name] for name in TAKEN} | {"eps": 1e-5}


OP = Op(
    name="hyper_close",
    reference=hyper_close,
    make_inputs=make_inputs,
    cases=(
        {"T": 1, "H": 128, "results": 0, "scales": 0},
        {"T": 3, "H": 384, "results": 1, "scales": 1},
        {"T": 32, "H": 640, "results": 2, "scales": 3},
    ),
    # float32: a float16 of `rotated` may round the other way; bf16: sum, streams, mean and hidden.
    tolerance={torch.float32: 2e-4, torch.bfloat16: 1e-2},
    kernels={
        "cuda": Kernel(
            "emberbox.ops.hyper_close.kernel_cuda:hyper_close", "cuda", min_capability=(8, 0)
        )
    },
)
