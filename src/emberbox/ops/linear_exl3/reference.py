"""Decode, then multiply."""

from torch import Tensor
from torch.nn import functional

from emberbox.formats.base import QuantTensor


def linear_exl3(x: Tensor, weight: QuantTensor, bias: Tensor | None = None) -> Tensor:
    decoded = weight.decode().to(x.dtype)
    return functional.linear(x, decoded, None if bias is None else bias.to(x.dtype))
