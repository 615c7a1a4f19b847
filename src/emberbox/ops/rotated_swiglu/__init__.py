"""Gate and up projections in EXL3, SwiGLU and the rotation for the projection down, as one op.

rotated float16 [2, T, I] and bank (gate, up), both [W, I], as in `rotated_linear`; suh float16 [W].
Returns rotate(swiglu(gate, up, limit), suh), float16 [T, W]; nothing is rounded in between.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.rotated_linear import KINDS, unscaled_weight
from emberbox.ops.rotated_swiglu.reference import rotated_swiglu
from emberbox.ops.rotation import rotate


def make_inputs(
    T: int, N: int, K: int, mixed: int = 0, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """mixed: 1 for a gate and an up projection of two kinds. Nothing depends on dtype."""
    r = Random(seed, torch.float32)
    x = r.normal(2, T, K, scale=2.0)
    signs = 1 - 2 * r.integers(N, high=2)
    return {
        "rotated": rotate(x, torch.ones(K)),
        "bank": tuple(unscaled_weight(r, (N, K), *KINDS[i if mixed else 0]) for i in range(2)),
        "limit": 1.5,
        "suh": (r.uniform(N, low=0.5, high=1.5) * signs).half(),
    }


OP = Op(
    name="rotated_swiglu",
    reference=rotated_swiglu,
    make_inputs=make_inputs,
    cases=(
        {"T": 1, "N": 128, "K": 128},
        {"T": 3, "N": 384, "K": 256},
        {"T": 9, "N": 256, "K": 384, "mixed": 1},
        {"T": 19, "N": 128, "K": 640},
    ),
    # Equal but where a last bit of a float16 falls otherwise, which sums in another order decide.
    tolerance={torch.float32: 2e-4},
    kernels={
        "cuda": Kernel(
            "emberbox.ops.rotated_swiglu.kernel_cuda:rotated_swiglu",
            "cuda",
            min_capability=(8, 0),
            ready="emberbox.ops.rotated_linear.bank:bank_of",
        )
    },
)
