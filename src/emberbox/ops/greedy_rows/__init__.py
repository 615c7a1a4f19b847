"""The likeliest token of each row of logits, and whether a row can be trusted.

logits [R, V] float32 or bfloat16, R up to 32. Returns (argmax int64 [R]: the first index of the
largest value; is_finite bool [R]). In a row with NaN or an infinity is_finite is false and the
index is any of 0 .. V - 1.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.greedy_rows.reference import greedy_rows
from emberbox.ops.inputs import Random


def make_inputs(R: int, V: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    """Rounded to halves: many equal maxima."""
    r = Random(seed, dtype)
    return {"logits": (2 * r.normal(R, V)).round() / 2}


OP = Op(
    name="greedy_rows",
    reference=greedy_rows,
    make_inputs=make_inputs,
    cases=({"R": 1, "V": 1}, {"R": 3, "V": 1031}, {"R": 32, "V": 5003}, {"R": 2, "V": 154880}),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    kernels={
        "cuda": Kernel("emberbox.ops.greedy_rows.kernel_cuda:greedy_rows", "cuda", (8, 0)),
    },
)
