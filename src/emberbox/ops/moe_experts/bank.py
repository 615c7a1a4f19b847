"""The routed experts of a layer in prepared EXL3, and the table by which kernels find them."""

from functools import cached_property
from typing import TypeGuard

import torch
from torch import Tensor

from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.ops.linear_exl3.kernel_cuda import codebook_number
from emberbox.ops.prepared import LANES, PREPARED, prepared

CODEBOOK_STEP = 4  # kind = 4 rate + codebook
Projections = tuple[tuple[Tensor | QuantTensor, ...], ...]


class ExpertBank(tuple[tuple[QuantTensor, ...], ...]):
    """Experts (gate, up, down), all prepared and on one device; a tuple to a reference.

    Rates and codebooks may differ, shapes may not.
    """

    @property
    def widths(self) -> tuple[int, int]:
        """(hidden, of an expert)."""
        width, hidden = self[0][0].shape
        return hidden, width

    @cached_property
    def matrices(self) -> Tensor:
        """int64 [E, 3, 4] on the device: addresses of words, suh and svh, and the kind."""
        rows = [[_row(weight) for weight in expert] for expert in self]
        return torch.tensor(rows, dtype=torch.int64).to(self[0][0].device)

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Distinct kinds of gate and up, and of down."""
        entry = {kind_of(w) for expert in self for w in expert[:2]}
        down = {kind_of(expert[2]) for expert in self}
        return tuple(sorted(entry)), tuple(sorted(down))


class PlainBank(tuple[tuple[Tensor, ...], ...]):
    """Plain experts (gate, up, down) of one shape and type, as views of three tensors."""

    stacked: tuple[Tensor, Tensor, Tensor]  # [E, W, H], [E, W, H], [E, H, W]

    @classmethod
    def of(cls, projections: tuple[tuple[Tensor, ...], ...]) -> "PlainBank":
        """Copies them together, one projection after another."""
        gate, up, down = (torch.stack(each) for each in zip(*projections, strict=True))
        bank = cls(zip(gate, up, down, strict=True))
        bank.stacked = gate, up, down
        return bank


def bank_of(projections: Projections) -> Projections:
    """An ExpertBank of EXL3 experts, of one shape, in whole Hadamard blocks; a PlainBank of plain
    ones of one shape; others as they are."""
    if isinstance(projections, ExpertBank | PlainBank):
        return projections
    plain = tuple(tuple(w for w in expert if isinstance(w, Tensor)) for expert in projections)
    is_plain = list(map(len, plain)) == list(map(len, projections))
    kinds = {tuple((weight.shape, weight.dtype) for weight in expert) for expert in plain}
    if is_plain and len(kinds) == 1:
        return PlainBank.of(plain)
    experts = []
    for expert in projections:
        matrices = tuple(prepared(w) for w in expert if _is_exl3(w))
        if len(matrices) < len(expert):
            return projections
        experts.append(matrices)
    shapes = {tuple(weight.shape for weight in expert) for expert in experts}
    if len(shapes) != 1 or any(n % exl3.BLOCK for shape in next(iter(shapes)) for n in shape):
        return projections
    bank = ExpertBank(experts)
    bank.matrices  # noqa: B018  now: nothing may be copied while a graph is captured
    return bank


def ready_bank(projections: Projections) -> Projections:
    """The same, for once, at load: plain experts become views of their bank, so that whoever still
    holds them does not hold the memory twice."""
    bank = bank_of(projections)
    if isinstance(bank, PlainBank):
        for expert, views in zip(projections, bank, strict=True):
            for weight, view in zip(expert, views, strict=True):
                if isinstance(weight, Tensor):
                    weight.data = view
    return bank


def _is_exl3(weight: Tensor | QuantTensor) -> TypeGuard[QuantTensor]:
    return isinstance(weight, QuantTensor) and weight.format in (exl3.FORMAT, PREPARED)


def kind_of(weight: QuantTensor) -> int:
    """Rate and codebook of a prepared weight as one number."""
    words: Tensor = weight.parts["words"]
    return CODEBOOK_STEP * (words.shape[-1] // LANES) + codebook_number(weight)


def macros_of(kind: int) -> tuple[tuple[str, int], ...]:
    """What a kernel for such matrices is compiled with."""
    return (("RATE", kind // CODEBOOK_STEP), ("CODEBOOK", kind % CODEBOOK_STEP))


def _row(weight: QuantTensor) -> list[int]:
    addresses = [weight.parts[name].data_ptr() for name in ("words", "suh", "svh")]
    return [*addresses, kind_of(weight)]
