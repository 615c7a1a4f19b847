"""A plain matrix product."""

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # The cast serves training, where master weights are wider than activations.
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
