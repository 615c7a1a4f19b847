"""From weights to the tensors that are written, by the target of each item.

Knows formats and memory; knows neither the order of the network nor files.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from emberbox.compress.conversion_items import (
    FORMAT_BY_NAME,
    Item,
    TensorSpec,
    computed_together,
)
from emberbox.compress.hessian import Hessian
from emberbox.compress.quantize_exl3 import QuantReport, group_bytes, quantize
from emberbox.compress.quantize_fp8 import quantize_fp8
from emberbox.compress.quantize_nvfp4 import quantize_nvfp4
from emberbox.compress.source import Source
from emberbox.compress.trellis_plan import TrellisPlan
from emberbox.compress.trellis_steps import Search
from emberbox.errors import OpError
from emberbox.formats.base import QuantTensor
from emberbox.formats.dtypes import TORCH_DTYPES


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """An item as it is written. value: what a reader will decode, None if that is the source's."""

    item: Item
    tensors: tuple[tuple[TensorSpec, Tensor], ...]
    value: Tensor | QuantTensor | None = None
    report: QuantReport | None = None

    def weight(self, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """`value` decoded where it is needed."""
        if isinstance(self.value, QuantTensor):
            return self.value.to(device).decode().to(dtype)
        return None if self.value is None else self.value.to(device, dtype)


@dataclass(frozen=True, slots=True)
class Encoder:
    """max_bytes: of memory on `device` for the matrices that are searched together."""

    source: Source
    search: Search
    device: torch.device
    max_bytes: int

    def __call__(
        self,
        items: Sequence[Item],
        hessian: Callable[[Item], Hessian],
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Iterator[Encoded]:
        """Every item once, in an order that depends on the items alone. Raises OpError by name.

        weights: of items that the caller has read already.
        """
        searched = [item for item in items if item.target.format == "exl3"]
        for item in items:
            if item.target.format in ("keep", "bf16"):
                yield self._plain(item)
            elif item.target.format == "fp8_block":
                yield _quantised(item, quantize_fp8(item.name, self.weight(item, weights)))
        rounded = [item for item in items if item.target.format == "nvfp4"]
        for together in computed_together(rounded):
            made = quantize_nvfp4({item.name: self.weight(item, weights) for item in together})
            yield from (_quantised(item, made[item.name]) for item in together)
        for group in self.groups(searched):
            yield from self._exl3(group, hessian, weights)

    def weight(self, item: Item, weights: Mapping[str, Tensor]) -> Tensor:
        found = weights.get(item.name)
        return self.source.weight(item, self.device) if found is None else found

    def _plain(self, item: Item) -> Encoded:
        if item.target.format == "keep":
            return Encoded(item, tuple(self.source.moved(item)))
        spec, weight = item.outputs[0], self.source.weight(item, torch.device("cpu"))
        cast = weight.to(TORCH_DTYPES[spec.dtype])
        if not cast.isfinite().all():
            raise OpError(f"{spec.name}: holds values that {spec.dtype} cannot")
        return Encoded(item, ((spec, cast),), cast)

    def groups(self, items: Iterable[Item]) -> Iterator[list[Item]]:
        """Matrices that can go through the search together, as many as memory allows."""
        alike: dict[object, list[Item]] = {}
        for item in items:
            alike.setdefault((item.shape, item.target), []).append(item)
        for found in alike.values():
            size = self.group_size(found[0])
            yield from (found[at : at + size] for at in range(0, len(found), size))

    def group_size(self, item: Item) -> int:
        """How many matrices like `item` are searched at once: at least one."""
        return group_size(item, self.device, self.max_bytes)

    def _exl3(
        self,
        items: Sequence[Item],
        hessian: Callable[[Item], Hessian],
        weights: Mapping[str, Tensor],
    ) -> Iterator[Encoded]:
        plans = [seeded_plan(item, item.target.bits) for item in items]
        hessians = [hessian(item) for item in items]
        if all(one is hessians[0] for one in hessians):
            hessians = hessians[:1]
        try:
            made = quantize(
                [self.weight(item, weights) for item in items],
                hessians,
                plans,
                self.search,
                device=self.device,
            )
        except OpError as error:
            names = items[0].name if len(items) == 1 else f"{items[0].name} to {items[-1].name}"
            raise OpError(f"{names}: {error}") from error
        for item, one in zip(items, made, strict=True):
            yield _quantised(item, one.tensor, one.report)


def group_size(item: Item, device: torch.device | str, max_bytes: int) -> int:
    """How many matrices like `item` are searched at once in `max_bytes`: at least one."""
    out_features, in_features = item.shape
    one, two = (group_bytes(n, in_features, out_features, device) for n in (1, 2))
    return 1 + max(0, max_bytes - one) // (two - one)


def seeded_plan(item: Item, bits: float | None) -> TrellisPlan:
    """The seed is the name's, so that a matrix comes out the same whatever lies around it."""
    codebook = item.target.codebook
    assert bits is not None, "the recipe has chosen"
    assert codebook is not None, "the recipe has chosen"
    return TrellisPlan(bits=bits, codebook=codebook, seed=zlib.crc32(item.name.encode()))


def _quantised(item: Item, tensor: QuantTensor, report: QuantReport | None = None) -> Encoded:
    known = FORMAT_BY_NAME[item.target.format]
    parts = {item.name + known.parts[part].suffix: value for part, value in tensor.parts.items()}
    tensors = tuple((spec, parts[spec.name].cpu()) for spec in item.outputs)
    for spec, value in tensors:
        if value.numel() != torch.Size(spec.shape).numel():
            raise OpError(f"{spec.name}: shape {list(value.shape)}, the plan says {spec.shape}")
    return Encoded(item, tensors, tensor, report)
