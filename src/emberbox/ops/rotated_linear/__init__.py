"""Products with EXL3 weights, side by side, of rows that are rotated already.

rotated float16 [n, T, I] as `ops.rotation.rotate` makes them, rows i for matrix i; bank: n EXL3
weights [N_i, I], N_i and I in whole Hadamard blocks. A weight's suh is not applied: it is in
`rotated`. Returns [T, sum N_i] of `dtype`, summed in float32. A plain [N_i, I] tensor in place of a
weight is one whose suh is 1; float64 copies of `rotated` give float64.
"""

import torch

from emberbox.formats.base import QuantTensor
from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.linear_exl3 import random_weight
from emberbox.ops.rotated_linear.reference import rotated_linear
from emberbox.ops.rotation import rotate

# Words of a tile and codebook of each matrix in turn, where they differ.
KINDS = ((32, "mul1"), (48, "mcg"), (32, "mul1"), (40, "mul1"), (64, None))


def make_inputs(  # noqa: PLR0913  the sizes of a case
    T: int, N: int, K: int, matrices: int, mixed: int = 0, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """Matrix i has N + 128 i outputs and K inputs. mixed: 1 for matrices of several kinds."""
    r = Random(seed, dtype)
    kinds = [KINDS[i % len(KINDS) if mixed else 0] for i in range(matrices)]
    x = r.normal(matrices, T, K, dtype=torch.float32)
    return {
        "rotated": rotate(x, torch.ones(K)),
        "bank": tuple(unscaled_weight(r, (N + 128 * i, K), *kind) for i, kind in enumerate(kinds)),
        "dtype": dtype,
    }


def unscaled_weight(
    r: Random, shape: tuple[int, int], num_words: int, marker: str | None
) -> QuantTensor:
    """A stored weight (out, in) whose suh is 1: of standard normal inputs it makes such outputs."""
    weight = random_weight(r, shape, num_words, marker)
    suh, svh = weight.parts["suh"], weight.parts["svh"]
    parts = {"suh": torch.ones_like(suh), "svh": (svh.float() * shape[1] ** -0.5).half()}
    return QuantTensor(weight.format, {**weight.parts, **parts}, shape)


OP = Op(
    name="rotated_linear",
    reference=rotated_linear,
    make_inputs=make_inputs,
    cases=(
        {"T": 1, "N": 128, "K": 128, "matrices": 1},
        {"T": 3, "N": 128, "K": 384, "matrices": 3},
        {"T": 9, "N": 256, "K": 256, "matrices": 5, "mixed": 1},
        {"T": 19, "N": 384, "K": 128, "matrices": 2, "mixed": 1},
        {"T": 32, "N": 128, "K": 640, "matrices": 2},
    ),
    tolerance={torch.float32: 5e-6, torch.bfloat16: 4e-3},  # 4e-3: one bf16 rounding
    kernels={
        "cuda": Kernel(
            "emberbox.ops.rotated_linear.kernel_cuda:rotated_linear",
            "cuda",
            min_capability=(8, 0),
            ready="emberbox.ops.rotated_linear.bank:bank_of",
        )
    },
)
