"""Rotate back, decode, then multiply."""

from dataclasses import replace

import torch
from torch import Tensor

from emberbox.formats.base import QuantTensor
from emberbox.ops.rotation import unrotate

INPUT_SCALES = ("suh", "su")  # of which a weight has one


def rotated_linear(
    rotated: Tensor, bank: tuple[Tensor | QuantTensor, ...], dtype: torch.dtype
) -> Tensor:
    wide = torch.promote_types(rotated.dtype, torch.float32)
    inputs = unrotate(rotated, wide)
    products = [x @ _unscaled(w).to(wide).T for x, w in zip(inputs, bank, strict=True)]
    return torch.cat(products, -1).to(dtype if wide is torch.float32 else wide)


def _unscaled(weight: Tensor | QuantTensor) -> Tensor:
    """[N, I]: what the weight decodes to if its suh is 1, as that of a plain one is."""
    if isinstance(weight, Tensor):
        return weight
    kept = {name: part for name, part in weight.parts.items() if name not in INPUT_SCALES}
    ones = torch.ones(weight.shape[1], dtype=torch.float16, device=weight.device)
    return replace(weight, parts={**kept, "suh": ones}).decode()
