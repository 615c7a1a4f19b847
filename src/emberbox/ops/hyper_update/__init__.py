"""After a sublayer: X'[j] = post[j] * y + sum_i mix[i][j] * X[i] (architecture.md 3.1).

streams [T, S, H], y [T, H] of one dtype; post [T, S], mix [T, S, S] (source, destination) float32.
Returns [T, S, H] in streams' dtype.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.hyper_update.reference import hyper_update
from emberbox.ops.inputs import Random


def make_inputs(T: int, S: int, H: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    return {
        "streams": r.normal(T, S, H),
        "y": r.normal(T, H),
        "post": r.uniform(T, S, high=2.0),
        "mix": torch.softmax(r.normal(T, S, S, dtype=torch.float32), -1),
    }


OP = Op(
    name="hyper_update",
    reference=hyper_update,
    make_inputs=make_inputs,
    cases=({"T": 1, "S": 4, "H": 5}, {"T": 7, "S": 4, "H": 33}),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 4e-3},
    kernels={"cpu": Kernel("emberbox.ops.hyper_update.kernel_cpu:hyper_update", "cpu")},
)
