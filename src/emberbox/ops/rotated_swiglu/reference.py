"""The products side by side, then the activation and the rotation."""

import torch
from torch import Tensor

from emberbox.formats.base import QuantTensor
from emberbox.ops.rotated_linear.reference import rotated_linear
from emberbox.ops.swiglu_open.reference import swiglu_open


def rotated_swiglu(
    rotated: Tensor, bank: tuple[Tensor | QuantTensor, ...], limit: float, suh: Tensor
) -> Tensor:
    return swiglu_open(rotated_linear(rotated, bank, torch.float32), limit, suh)
