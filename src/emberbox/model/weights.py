"""Checkpoint tensors to network parameters: everything is matched before any of it is read.

Promises: a tensor nobody consumes, a parameter nobody fills, a wrong shape, a wrong dtype and a
value that is not finite are refusals, and all reasons of a refusal come at once. How a weight is
stored is read off the tensors beside it, never off the config. Knows no kernels and no requests.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from emberbox.errors import LoadRefused
from emberbox.formats.base import Format, QuantTensor
from emberbox.formats.dtypes import DTYPE_TAGS, TORCH_DTYPES
from emberbox.formats.table import FORMATS, detect
from emberbox.model.config import Glm5NextConfig
from emberbox.model.layers import Operand
from emberbox.model.mismatch import both_values, not_known, shown
from emberbox.model.parameters import (
    Kind,
    Parameter,
    Part,
    Slot,
    Target,
    mtp_prefix,
    parameter_slots,
)
from emberbox.store.checkpoint import Checkpoint
from emberbox.store.safetensors_header import TensorInfo
from emberbox.store.verified_reader import VerifiedReader, ring_bytes

WEIGHT = ".weight"
STORED: Mapping[Kind, tuple[str, ...]] = {
    Kind.PLAIN: ("BF16", "F16", "F32"),
    Kind.WIDENED: ("BF16", "F16", "F32"),
    Kind.FP32: ("F32",),
}
HINT = "the folder holds another model, is not complete, or was written by a broken converter"


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter and where its bytes lie: one tensor, or the parts of a weight by part name."""

    parameter: Parameter
    infos: Mapping[str, TensorInfo]
    format: Format | None = None

    @property
    def is_quantised(self) -> bool:
        return self.format is not None and not self.format.is_plain

    @property
    def format_name(self) -> str:
        return "" if self.format is None else self.format.name

    def loaded_bytes(self, item: int, decoded: bool, kept: Container[str]) -> int:
        """As `Assignment.loaded_bytes`, of this parameter."""
        if self.is_quantised and decoded and self.format_name not in kept:
            return prod(self.parameter.shape) * item
        infos = self.infos.values()
        return sum(i.num_bytes * (item // 2 if i.dtype == "BF16" else 1) for i in infos)


@dataclass(frozen=True, slots=True)
class Placement:
    """One entry `target.name` of the loaded parameters, from its pieces."""

    target: Target
    pieces: tuple[Piece, ...]

    @property
    def part(self) -> Part:
        return self.pieces[0].parameter.part

    def infos(self) -> Iterator[TensorInfo]:
        """Every tensor to read."""
        return (info for piece in self.pieces for info in piece.infos.values())


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which tensors fill which parameters. `spare` stay on disk: what the caller chose not to load,
    and plain weights that lie beside their own quantised form.
    """

    placements: tuple[Placement, ...]
    where: str
    spare: tuple[TensorInfo, ...] = ()

    @property
    def parts(self) -> frozenset[Part]:
        """The parts of the model that will be loaded."""
        return frozenset(placement.part for placement in self.placements)

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return sum(info.num_bytes for placement in self.placements for info in placement.infos())

    @property
    def quantised_formats(self) -> frozenset[str]:
        """Names of the quantised formats that weights are stored in."""
        pieces = (piece for p in self.placements for piece in p.pieces)
        return frozenset(piece.format_name for piece in pieces if piece.is_quantised)

    @property
    def has_quantised(self) -> bool:
        """Whether any weight is stored in a quantised format."""
        return bool(self.quantised_formats)

    def loaded_bytes(self, item: int, *, decoded: bool = False, kept: Container[str] = ()) -> int:
        """Bytes in memory once loaded, where plain BF16 matrices take `item` bytes a weight.

        `decoded`: quantised weights do too, but for those of formats named in `kept`.
        """
        pieces = (piece for p in self.placements for piece in p.pieces)
        return sum(piece.loaded_bytes(item, decoded, kept) for piece in pieces)

    def without(self, part: Part) -> "Assignment":
        """The same, with the tensors of MTP layer or vision tower left on disk, as `spare`."""
        left = tuple(i for p in self.placements if p.part is part for i in p.infos())
        kept = tuple(placement for placement in self.placements if placement.part is not part)
        return replace(self, placements=kept, spare=self.spare + left)


def assign(config: Glm5NextConfig, infos: Mapping[str, TensorInfo]) -> Assignment:
    """Match the tensors of a checkpoint to the parameters of `config`. Reads no weights.

    The MTP layer may be absent as a whole. Raises LoadRefused with every missing, unknown,
    misshapen or wrongly typed tensor, every parameter stored in two forms, and every count in the
    config that the tensors contradict.
    """
    has_mtp = any(name.startswith(mtp_prefix(config)) for name in infos)
    matcher = _Matcher(infos)
    for slot in parameter_slots(config):
        if has_mtp or slot.part is not Part.MTP:
            matcher.fill(slot)
    reasons = matcher.reasons
    unknown = (name for name in infos if name not in matcher.claimed)
    reasons += [f"{shown(name)}: {not_known(name, config)}" for name in unknown]
    where = str(next(iter(infos.values())).file.parent) if infos else "no tensors"
    if reasons:
        raise LoadRefused(where, [*both_values(config, infos), *reasons], hint=HINT)
    return Assignment(tuple(matcher.placements), where, tuple(matcher.spare))


class _Matcher:
    """Fills slots from `infos`; collects placements, claimed names and reasons."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = infos
        self.placements: list[Placement] = []
        self.claimed: set[str] = set()
        self.spare: list[TensorInfo] = []
        self.reasons: list[str] = []

    def fill(self, slot: Slot) -> None:
        """Fill `slot` in the form the checkpoint holds it."""
        form = slot.forms[0] if len(slot.forms) == 1 else self._choose(slot)
        filled = [(target, tuple(map(self._piece, target.pieces))) for target in form]
        apart = any(piece.is_quantised for _, pieces in filled for piece in pieces)
        for target, pieces in filled:
            if apart and len(pieces) > 1:
                self.placements += [_alone(piece) for piece in pieces]
            else:
                self.placements.append(Placement(target, pieces))

    def _choose(self, slot: Slot) -> tuple[Target, ...]:
        """The form that is there; the released one if none is. Two are a reason, unless one is
        quantised and the other is not: published files keep the vision tower's q, k, v both ways.
        """
        held = [form for form in slot.forms if any(map(self._is_held, _parameters(form)))]
        quantised = [form for form in held if any(map(self._is_quantised, _parameters(form)))]
        if len(held) > 1 and len(quantised) == 1:
            pieces = [self._piece(p) for f in held if f not in quantised for p in _parameters(f)]
            self.spare += [info for piece in pieces for info in piece.infos.values()]
            return quantised[0]
        for other in held[1:]:
            beside = ", ".join(parameter.name for parameter in _parameters(held[0]))
            twice = [name for p in _parameters(other) for name in self._names(p)]
            self.reasons += [f"{name}: stored beside {beside}" for name in twice]
            self.claimed.update(twice)
        return held[0] if held else slot.forms[0]

    def _names(self, parameter: Parameter) -> list[str]:
        """The tensors that hold `parameter`, in whatever format."""
        if parameter.kind is not Kind.LINEAR:
            return [parameter.name] if parameter.name in self.infos else []
        prefix = parameter.name.removesuffix(WEIGHT)
        found = detect(prefix, self.infos)
        names = found.part_names(prefix).values() if found else ()
        return [name for name in names if name in self.infos]

    def _is_held(self, parameter: Parameter) -> bool:
        return bool(self._names(parameter))

    def _is_quantised(self, parameter: Parameter) -> bool:
        found = detect(parameter.name.removesuffix(WEIGHT), self.infos)
        return parameter.kind is Kind.LINEAR and found is not None and not found.is_plain

    def _piece(self, parameter: Parameter) -> Piece:
        if parameter.kind is Kind.LINEAR:
            return self._linear(parameter)
        name, info = parameter.name, self.infos.get(parameter.name)
        if info is None:
            self.reasons.append(f"{name}: missing")
            return Piece(parameter, {})
        self.claimed.add(name)
        expected = STORED[parameter.kind]
        if info.dtype not in expected:
            self.reasons.append(f"{name}: dtype {info.dtype}, expected {' or '.join(expected)}")
        if info.shape != parameter.shape:
            wanted = list(parameter.shape)
            self.reasons.append(f"{name}: shape {list(info.shape)}, expected {wanted}")
        return Piece(parameter, {"": info})

    def _linear(self, parameter: Parameter) -> Piece:
        prefix, shape = parameter.name.removesuffix(WEIGHT), parameter.shape
        found = detect(prefix, self.infos)
        if found is None:
            self.reasons.append(f"{parameter.name}: missing")
            return Piece(parameter, {})
        problems = found.problems(prefix, (shape[0], shape[1]), self.infos)
        if found.is_plain and problems:
            problems += self._incomplete(prefix)
        self.reasons += problems
        names = found.part_names(prefix)
        infos = {part: self.infos[name] for part, name in names.items() if name in self.infos}
        self.claimed.update(info.name for info in infos.values())
        return Piece(parameter, infos, found)

    def _incomplete(self, prefix: str) -> Iterator[str]:
        """A weight of a dtype that no plain weight has: which tensors a format wants beside it."""
        dtype = self.infos[prefix + WEIGHT].dtype
        for other in FORMATS:
            part = next((p for p in other.parts.values() if p.suffix == WEIGHT), None)
            if not other.is_plain and part and dtype in {DTYPE_TAGS[d] for d in part.dtypes}:
                for spec in other.parts.values():
                    name = prefix + spec.suffix
                    if name in self.infos:
                        self.claimed.add(name)
                    elif not spec.optional:
                        yield f"{name}: missing (part of {other.name})"


def _parameters(form: tuple[Target, ...]) -> Iterator[Parameter]:
    return (piece for target in form for piece in target.pieces)


def _alone(piece: Piece) -> Placement:
    parameter = piece.parameter
    return Placement(Target(parameter.name, parameter.shape, (parameter,)), (piece,))


def load_parameters(
    checkpoint: Checkpoint,
    assignment: Assignment,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    on_bytes: Callable[[int], None] | None = None,
) -> dict[str, Operand]:
    """Read every assigned tensor through one buffer: parameter name -> operand on `device`.

    Plain weights and vectors are of `dtype`, what must stay wide is float32, quantised weights are
    QuantTensors. `on_bytes` hears the size of each tensor read. Raises DamagedTensor naming every
    tensor that is not what its digest says, LoadRefused naming every one that holds a NaN or an
    infinity, or that `dtype` cannot hold.
    """
    target = torch.device(device)
    size = ring_bytes([i.num_bytes for p in assignment.placements for i in p.infos()])
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=target.type == "cuda")

    def read(info: TensorInfo) -> Tensor:
        start = reader.read(info)
        if on_bytes is not None:
            on_bytes(info.num_bytes)
        data = buffer[start : start + info.num_bytes]
        return data.view(TORCH_DTYPES[info.dtype]).view(info.shape)

    with VerifiedReader(checkpoint, buffer.numpy()) as reader:
        return _Loader(read, target, dtype, reuses_memory=True).load(assignment)


def parameters_from_dict(
    config: Glm5NextConfig, tensors: Mapping[str, Tensor], *, dtype: torch.dtype
) -> dict[str, Operand]:
    """The same from tensors in memory under released names; what needs no cast is shared.

    As strict as from a file. Gradients flow back to `tensors`. Raises LoadRefused.
    """
    infos = {
        name: TensorInfo(
            name=name,
            dtype=DTYPE_TAGS[tensor.dtype],
            shape=tuple(tensor.shape),
            file=Path("memory", "tensors"),
            start=0,
            stop=tensor.nbytes,
        )
        for name, tensor in tensors.items()
    }
    assignment = assign(config, infos)
    device = next(iter(tensors.values())).device
    read = _Loader(lambda info: tensors[info.name], device, dtype, reuses_memory=False)
    return read.load(assignment)


class _Loader:
    """Turns placements into operands; `read` gives a tensor's stored values.

    With `reuses_memory` those are gone after the next call of `read`, and are copied always.
    """

    def __init__(
        self,
        read: Callable[[TensorInfo], Tensor],
        device: torch.device,
        dtype: torch.dtype,
        *,
        reuses_memory: bool,
    ) -> None:
        self.read, self.device, self.dtype = read, device, dtype
        self.reuses_memory = reuses_memory
        self.bad: list[str] = []

    def load(self, assignment: Assignment) -> dict[str, Operand]:
        # In the order of the files: one pass over each, without seeking back.
        ordered = sorted(assignment.placements, key=_position)
        operands = {placement.target.name: self._operand(placement) for placement in ordered}
        if self.bad:
            raise LoadRefused(assignment.where, self.bad, hint="fetch these files again")
        return operands

    def _operand(self, placement: Placement) -> Operand:
        first = placement.pieces[0]
        if first.format is not None and first.is_quantised:
            parts = {part: self._tensor(info, None) for part, info in first.infos.items()}
            out_features, in_features = first.parameter.shape
            return QuantTensor(first.format, parts, (out_features, in_features))
        dtype = self.dtype
        if first.parameter.kind in (Kind.FP32, Kind.WIDENED):
            dtype = torch.promote_types(dtype, torch.float32)
        pieces = [self._tensor(info, dtype) for info in placement.infos()]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        shape = placement.target.shape
        # A tensor in memory is handed on as it is, a leaf of the caller's graph if it was one.
        return whole if whole.shape == shape else whole.reshape(shape)

    def _tensor(self, info: TensorInfo, dtype: torch.dtype | None) -> Tensor:
        stored = self.read(info)
        dtype = stored.dtype if dtype is None else dtype
        kept = stored.to(self.device, dtype, copy=self.reuses_memory)
        if not is_finite(kept):
            overflow = dtype != stored.dtype and is_finite(stored)
            what = f"values that {dtype} cannot hold" if overflow else "NaN or infinity"
            self.bad.append(f"{info.name}: holds {what}")
        return kept


def _position(placement: Placement) -> tuple[str, int]:
    first = next(placement.infos())
    return str(first.file), first.start


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite. Copies nothing but rare 8-bit floats."""
    values = tensor.detach()
    if not values.is_floating_point() or values.numel() == 0:
        return True
    if values.dtype is torch.float8_e4m3fn:  # NaN is 0x7F and 0xFF, the largest byte signed and not
        return bool(values.view(torch.int8).max() < 0x7F) and bool(
            values.view(torch.uint8).max() < 0xFF
        )
    if values.element_size() == 1:
        values = values.float()
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(values))
