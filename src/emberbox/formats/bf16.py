"""Plain weights: one tensor `.weight` [out, in] in BF16, F16 or F32. Decoding is a cast."""

from collections.abc import Mapping

import torch
from torch import Tensor

from emberbox.formats.base import Format, Part, Shape, ShapePattern


def part_shapes(shape: Shape) -> dict[str, ShapePattern]:
    """weight [out, in]."""
    return {"weight": shape}


def decode(parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """float32 [out, in], exact."""
    return parts["weight"].float()


def encode(weight: Tensor) -> dict[str, Tensor]:
    """[out, in] of any float type -> BF16, rounded to nearest even."""
    return {"weight": weight.to(torch.bfloat16).contiguous()}


FORMAT = Format(
    name="bf16",
    parts={"weight": Part(".weight", (torch.bfloat16, torch.float16, torch.float32))},
    bits=16.0,
    multiple=(1, 1),
    part_shapes=part_shapes,
    decode=decode,
    encode=encode,
    is_plain=True,
)
