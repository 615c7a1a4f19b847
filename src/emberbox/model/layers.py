"""The small parts every layer is made of. Weights are operands: a plain tensor or a QuantTensor."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from emberbox.formats.base import QuantTensor
from emberbox.ops.table import OpTable

Operand: TypeAlias = Tensor | QuantTensor
Parameters: TypeAlias = Mapping[str, Operand]


ROWS = 640  # of a long batch that are computed together, so that what they need stays small


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) of x [T, ...], ROWS at a time; a row of the result follows from its own alone."""
    if x.shape[0] <= ROWS:
        return function(x)
    return torch.cat([function(x[at : at + ROWS]) for at in range(0, x.shape[0], ROWS)])


def plain(params: Parameters, name: str) -> Tensor:
    """The parameter as a tensor; a quantised one is decoded to float32."""
    value = params[name]
    return value.decode() if isinstance(value, QuantTensor) else value


def split_last(x: Tensor, *sizes: int) -> Tensor:
    """x [..., prod(sizes)] -> [..., *sizes]."""
    return x.reshape(*x.shape[:-1], *sizes)


class Linear:
    """y = x W^T + b with the op that suits the weight's format."""

    def __init__(self, ops: OpTable, weight: Operand, bias: Tensor | None = None) -> None:
        self.apply, self.weight, self.bias = ops.linear_for(weight), weight, bias

    @classmethod
    def load(cls, ops: OpTable, params: Parameters, prefix: str, *, bias: bool = False) -> "Linear":
        """From `<prefix>.weight` and, with `bias`, `<prefix>.bias`."""
        return cls(
            ops, params[f"{prefix}.weight"], plain(params, f"{prefix}.bias") if bias else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        return self.apply(x, self.weight, self.bias)


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, ops: OpTable, weight: Tensor, eps: float) -> None:
        self.apply, self.weight, self.eps = ops.rms_norm, weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D] in x's dtype."""
        return self.apply(x, self.weight, self.eps)


class LayerNorm:
    """LayerNorm with weight and bias, in float32 or wider."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D] in float32 or wider: callers cast where they need x's dtype."""
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return torch.nn.functional.layer_norm(
            y, y.shape[-1:], self.weight.to(y.dtype), self.bias.to(y.dtype), self.eps
        )
