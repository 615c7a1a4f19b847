"""Matrix product with a weight in EXL3: y = x W^T + b, with W of `formats.exl3`.

x [..., K], weight a QuantTensor of shape [N, K] in the format exl3, bias [N] or None; y [..., N] in
x's dtype. Rate, codebook and padding are the weight's own. The reference decodes the weight to
float32 and rounds it to x's dtype; a kernel may rotate x instead, and is then as far from it as
rounding the rotated x is. Kernels read a weight in the form of `ops.prepared`; one as stored they
prepare at each call.
"""

import torch

from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.linear_exl3.reference import linear_exl3

# Words of a tile, 16 times the bits of a weight -> marker of the codebook that such a case has.
MARKERS = {32: "mul1", 40: "mul1", 48: "mcg", 64: None}
# Float16 has 11 bits: rotated activations rounded to it are off by 1.5e-4 of their norm.
KERNEL_TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 8e-3}


def make_inputs(
    T: int, N: int, K: int, num_words: int, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """num_words: a key of MARKERS."""
    r = Random(seed, dtype)
    weight = random_weight(r, (N, K), num_words, MARKERS[num_words])
    return {"x": r.normal(T, K), "weight": weight, "bias": r.normal(N)}


def random_weight(
    r: Random, shape: tuple[int, int], num_words: int, marker: str | None
) -> QuantTensor:
    """A stored weight (out, in) whose products with standard normal inputs are about as large."""
    shapes = exl3.part_shapes(shape)
    rows, columns, _ = shapes["trellis"]
    words = r.integers(rows or 0, columns or 0, num_words, high=1 << 16)
    parts = {"trellis": (words - (1 << 15)).to(torch.int16)}
    for name, scale in (("suh", shape[1] ** -0.5), ("svh", 1.0)):
        size = shapes[name][0] or 0
        parts[name] = (r.uniform(size, low=0.5, high=1.5) * scale).half() * _signs(r, size)
    if marker is not None:
        parts[marker] = torch.tensor(1, dtype=torch.int32)
    return QuantTensor(exl3.FORMAT, parts, shape)


def _signs(r: Random, size: int) -> torch.Tensor:
    return (1 - 2 * r.integers(size, high=2)).half()


OP = Op(
    name="linear_exl3",
    reference=linear_exl3,
    make_inputs=make_inputs,
    cases=(
        {"T": 1, "N": 128, "K": 128, "num_words": 32},
        {"T": 2, "N": 256, "K": 128, "num_words": 40},
        {"T": 3, "N": 384, "K": 256, "num_words": 48},
        {"T": 5, "N": 130, "K": 257, "num_words": 64},
        {"T": 16, "N": 257, "K": 130, "num_words": 48},
        {"T": 131, "N": 130, "K": 257, "num_words": 32},
    ),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 8e-3},
    kernels={
        "cuda": Kernel(
            "emberbox.ops.linear_exl3.kernel_cuda:linear_exl3",
            "cuda",
            min_capability=(8, 0),
            ready="emberbox.ops.prepared:prepared",
            tolerance=KERNEL_TOLERANCE,
        )
    },
)
