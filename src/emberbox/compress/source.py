"""The weights of the checkpoint that is compressed, one at a time, decoded or as they lie there.

Knows no recipe. What is read is checked for values that are not finite, by the tensor's name.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from emberbox.compress.conversion_items import Item, TensorSpec, layer_of
from emberbox.errors import LoadRefused
from emberbox.formats.base import QuantTensor
from emberbox.formats.dtypes import TORCH_DTYPES
from emberbox.formats.table import detect
from emberbox.model.config import Glm5NextConfig
from emberbox.model.weights import WEIGHT, Placement, assign, is_finite, load_parameters
from emberbox.store.checkpoint import Checkpoint

EXPERTS = ".mlp.experts."


class Source:
    """An opened checkpoint, and where its parameters lie."""

    def __init__(self, checkpoint: Checkpoint, config: Glm5NextConfig) -> None:
        self.checkpoint, self.config = checkpoint, config
        self._assignment = assign(config, checkpoint.tensors)

    def raw(self, name: str) -> Tensor:
        """A stored tensor in its own dtype, on the CPU. Raises LoadRefused for NaN or infinity."""
        info = self.checkpoint.tensors[name]
        data = torch.empty(info.num_bytes, dtype=torch.uint8)
        self.checkpoint.read_into(info, data.numpy())
        tensor = data.view(TORCH_DTYPES[info.dtype]).view(info.shape)
        if not is_finite(tensor):
            hint = "fetch this file again"
            raise LoadRefused(str(info.file), [f"{name}: holds NaN or infinity"], hint=hint)
        return tensor

    def part(self, item: Item, source: str, device: torch.device) -> Tensor:
        """One of `item.sources` on `device`, decoded there; a plain one in its stored dtype."""
        if not item.is_linear:
            return self.raw(source).to(device)
        infos = self.checkpoint.tensors
        found = detect(source, infos)
        assert found is not None, "the plan has seen it"
        names = found.part_names(source)
        parts = {p: self.raw(name).to(device) for p, name in names.items() if name in infos}
        if found.is_plain:
            return parts["weight"]
        # The shape of the whole: only a weight that is stored plain is ever cut or joined by rows.
        return QuantTensor(found, parts, self._shape(source + WEIGHT)).decode()

    def weight(self, item: Item, device: torch.device) -> Tensor:
        """The weight of an item: its sources joined along the first axis and cut to its rows."""
        parts = [self.part(item, source, device) for source in item.sources]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole if item.rows is None else whole[torch.tensor(item.rows, device=device)]

    def moved(self, item: Item) -> list[tuple[TensorSpec, Tensor]]:
        """The tensors of an item that only moves."""
        return [(spec, self.raw(name)) for name, spec in zip(item.reads, item.outputs, strict=True)]

    def parameters(
        self, prefix: str, *, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Everything under `prefix` but routed experts, decoded, under released names."""

        def is_wanted(placement: Placement) -> bool:
            name = placement.target.name
            return name.startswith(prefix) and EXPERTS not in name

        chosen = tuple(p for p in self._assignment.placements if is_wanted(p))
        found = load_parameters(
            self.checkpoint,
            replace(self._assignment, placements=chosen),
            device=device,
            dtype=dtype,
        )
        return {
            name: value.decode().to(dtype) if isinstance(value, QuantTensor) else value
            for name, value in found.items()
        }

    def _shape(self, name: str) -> tuple[int, int]:
        out_features, in_features = self._shapes[name]
        return out_features, in_features

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        pieces = (piece for p in self._assignment.placements for piece in p.pieces)
        return {piece.parameter.name: piece.parameter.shape for piece in pieces}


def expert_of(source: str) -> int | None:
    """The number of the routed expert that a module of the source belongs to."""
    if EXPERTS not in source or layer_of(source) is None:
        return None
    return int(source.partition(EXPERTS)[2].partition(".")[0])
