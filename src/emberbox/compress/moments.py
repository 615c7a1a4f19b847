"""Second moments of what each matrix of a sublayer is multiplied with, while it runs.

The network is handed an op table whose plain product looks at its weight: one that is to be
compressed adds its input to a sum. Matrices with one input (q, k, v; gate, up) share the sum.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from emberbox.compress.conversion_items import Item, joined
from emberbox.compress.hessian import Hessian, HessianSum
from emberbox.errors import OpError
from emberbox.model.weights import WEIGHT
from emberbox.ops.table import OpTable


class Recorder:
    """`ops` is `plain` with a product that records; `params` hold the weights it will be given."""

    def __init__(
        self,
        items: Iterable[Item],
        params: Mapping[str, Tensor],
        base: OpTable,
        device: torch.device,
    ) -> None:
        self.device = device
        self._sums: dict[str, HessianSum] = {}
        self._means: dict[str, Hessian] = {}
        self._by_weight: dict[int, HessianSum] = {}
        for item in items:
            if item.target.format == "exl3":
                self._watch(item, params, device)
        self.plain, product = base, base.linear

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            total = self._by_weight.get(id(weight))
            if total is not None:
                total.add(x)
            return product(x, weight, bias)

        self.ops = replace(base, linear=linear)

    def _watch(self, item: Item, params: Mapping[str, Tensor], device: torch.device) -> None:
        """The first weight of those that share an input is the one that adds."""
        key = joined(item.name)
        if key not in self._sums:
            self._sums[key] = HessianSum(item.shape[1], device)
            self._by_weight[id(params[item.sources[0] + WEIGHT])] = self._sums[key]

    def hessian(self, item: Item) -> Hessian:
        """Of what the matrix `item` was multiplied with; the same one for all that share it."""
        key = joined(item.name)
        if key not in self._means:
            self._means[key] = mean_of(self._sums[key], item.name)
        return self._means[key]


def mean_of(total: HessianSum, name: str) -> Hessian:
    """The mean of `total`, collected for the matrix `name`.

    Raises OpError if nothing reached it, or a value that is not finite did: it would be rounded
    without feedback, and nobody would know.
    """
    if total.num_dropped or not total.num_rows:
        raise OpError(
            f"{name}: {total.num_rows} rows of the calibration text reached it, and "
            f"{total.num_dropped} with values that are not finite"
        )
    return total.mean()


def unknown(item: Item) -> Hessian:
    """For a matrix that the calibration text never reaches: it is rounded without feedback."""
    return Hessian(torch.zeros(item.shape[1], item.shape[1]), 0)
