"""The gated delta rule over one sequence, from a state (architecture.md 3.2).

  S <- diag(exp g) S;  S <- S + k (x) (beta (v - S^T k));  o = S^T q
q, k [T, H, Dk], g [T, H, Dk] log-decay, all float32; v [T, H, Dv]; beta [T, H]; state [H, Dk, Dv]
float32. Returns o [T, H, Dv] and the new state, both float32 or wider. `state` is not changed.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.kda_chunk.reference import kda_chunk
from emberbox.ops.kda_inputs.reference import l2_norm


def make_inputs(
    T: int, H: int, D: int, *, collinear: int = 0, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """`collinear` makes all keys nearly parallel and decays weak, the hard case of the solve."""
    r, wide = Random(seed, dtype), torch.float32
    k = r.normal(T, H, D, dtype=wide)
    gate = r.uniform(T, H, D, low=-5.0, high=-0.01)
    if collinear:
        k = k[:1] + 1e-3 * k
        gate = gate * 1e-3
    return {
        "q": l2_norm(r.normal(T, H, D, dtype=wide)) * D**-0.5,
        "k": l2_norm(k),
        "v": r.normal(T, H, D),
        "gate": gate,
        "beta": torch.sigmoid(r.normal(T, H, dtype=wide)),
        "state": r.normal(H, D, D, scale=0.3, dtype=wide),
    }


OP = Op(
    name="kda_chunk",
    reference=kda_chunk,
    make_inputs=make_inputs,
    cases=(
        {"T": 1, "H": 1, "D": 8},
        {"T": 31, "H": 2, "D": 16},
        {"T": 97, "H": 3, "D": 32},
        {"T": 130, "H": 2, "D": 32, "collinear": 1},
    ),
    tolerance={torch.float32: 5e-5, torch.bfloat16: 5e-5},  # float32 inside either way
    kernels={
        "cpu": Kernel("emberbox.ops.kda_chunk.kernel_torch:kda_chunk", "cpu"),
        "cuda": Kernel("emberbox.ops.kda_chunk.kernel_torch:kda_chunk", "cuda"),
    },
)
