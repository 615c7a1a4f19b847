"""Several products of one input at once, as a decode step takes them: a row of them is one result.

Weights in EXL3 share what their input costs: the op before rotates it for each of them, and one
launch multiplies them all. Plain weights are multiplied one by one.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.model.layers import Linear
from emberbox.ops.prepared import PREPARED
from emberbox.ops.table import OpTable


class Projection:
    """Products with `linears`, their outputs side by side: [T, K] -> [T, N0 + N1 + ...]."""

    def __init__(self, ops: OpTable, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        weights = tuple(w for w in (linear.weight for linear in linears) if _is_rotatable(w))
        self.bank: tuple[QuantTensor, ...] | None = None
        if len(weights) == len(self.linears):
            self.bank = ops.ready_for("rotated_linear", weights)
        self.multiply = ops.rotated_linear

    @property
    def suhs(self) -> tuple[Tensor, ...]:
        """float16 [K] of each weight, by which its input is rotated; none: it wants it plain."""
        return () if self.bank is None else tuple(w.parts["suh"] for w in self.bank)

    @property
    def suh(self) -> Tensor | None:
        """The same of the only weight."""
        return self.suhs[0] if self.suhs else None

    def __call__(self, x: Tensor, rotated: Tensor, dtype: torch.dtype) -> Tensor:
        """x [T, K]; rotated float16 [n, T, K], of no use for plain weights. Computed in `dtype`."""
        if self.bank is not None:
            y: Tensor = self.multiply(rotated, self.bank, dtype)
            return y
        products = [linear(x.to(dtype)) for linear in self.linears]
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    def of(self, fed: Tensor, dtype: torch.dtype) -> Tensor:
        """The same of what an op returned that was given `suh`: rotated, or x itself."""
        return self(fed, fed.unsqueeze(0), dtype)


def _is_rotatable(weight: object) -> TypeGuard[QuantTensor]:
    """Prepared, and in whole Hadamard blocks."""
    return (
        isinstance(weight, QuantTensor)
        and weight.format is PREPARED
        and not any(size % exl3.BLOCK for size in weight.shape)
    )
