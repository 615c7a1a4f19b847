"""What tuning may change of a candidate: EXL3 scales and norms of the trunk, as one flat vector.

    scale = stored (1 + offset)        norm = stored + rms(stored) offset

The matrix between the scales of an EXL3 weight is decoded once and stays, and so does all the rest.
Knows no text and no optimiser.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from emberbox.errors import CheckpointError, LoadRefused
from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.formats.dtypes import TORCH_DTYPES
from emberbox.model.parameters import Kind, Part
from emberbox.model.weights import Assignment, Piece, is_finite, load_parameters
from emberbox.store.checkpoint import Checkpoint
from emberbox.store.safetensors_header import TensorInfo

SCALES = ("suh", "svh")
NORM = "norm"
# The network takes this one apart, so it cannot stay in factors.
WHOLE = "kv_b_proj.weight"
LEAST_RMS = 1e-6  # a norm of zeros can still be moved

# I input and O output channels of a weight, N values that are tuned


@dataclass(frozen=True, slots=True, eq=False)
class Factored:
    """An EXL3 weight in its factors: W^T = diag(suh) inner diag(svh), inner [I, O]."""

    suh: Tensor
    inner: Tensor
    svh: Tensor

    def weight(self) -> Tensor:
        """W [O, I]."""
        return (self.suh.unsqueeze(1) * self.inner * self.svh).T


Operands: TypeAlias = Mapping[str, Tensor | Factored]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor that is tuned, as it is stored. parameter: what it belongs to; role: of SCALES,
    or NORM."""

    parameter: str
    role: str
    info: TensorInfo

    @property
    def num_values(self) -> int:
        return self.info.num_bytes // TORCH_DTYPES[self.info.dtype].itemsize


def entries_of(assignment: Assignment) -> tuple[Entry, ...]:
    """Every tensor that can be tuned, those of one dtype together. Reads no weights.

    Old EXL3 files with signs in place of scales have none, and the indexer's norm only takes part
    in a choice.
    """
    found = [e for p in assignment.placements for piece in p.pieces for e in _entries(piece)]
    return tuple(sorted(found, key=lambda entry: (entry.info.dtype, entry.info.name)))


def _entries(piece: Piece) -> Iterator[Entry]:
    parameter = piece.parameter
    if parameter.part is not Part.TRUNK:
        return
    if _has_scales(piece):
        yield from (Entry(parameter.name, role, piece.infos[role]) for role in SCALES)
    elif parameter.kind is Kind.PLAIN and _is_norm(parameter.name):
        yield Entry(parameter.name, NORM, piece.infos[""])


def _is_norm(name: str) -> bool:
    return NORM in name and ".indexer." not in name


def _has_scales(piece: Piece) -> bool:
    is_exl3 = piece.format is not None and piece.format.name == "exl3"
    return is_exl3 and all(scale in piece.infos for scale in SCALES)


class Tunable:
    """A loaded candidate: what stays, and the entries that offsets [N] move."""

    def __init__(self, entries: tuple[Entry, ...], params: dict[str, Tensor | QuantTensor]) -> None:
        """`params`: the trunk as loaded, in float32 where plain. They are taken over. Raises
        CheckpointError for a matrix with a scale that leaves the range of its decoded values."""
        self.entries = entries
        stored = [self._stored(entry, params[entry.parameter]) for entry in entries]
        self.base = torch.cat([value.flatten().float() for value in stored])
        self._unit = torch.cat(
            [_unit(entry, value) for entry, value in zip(entries, stored, strict=True)]
        )
        own = {entry.parameter for entry in entries if entry.role in SCALES}
        self._inner: dict[str, Tensor] = {}
        self._fixed: dict[str, Tensor] = {}
        for name in list(params):
            value = params.pop(name)
            if name in own:
                assert isinstance(value, QuantTensor)
                self._inner[name] = _inner(value)
            else:
                self._fixed[name] = value.decode() if isinstance(value, QuantTensor) else value
        self._require_finite()

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, assignment: Assignment, device: torch.device
    ) -> "Tunable":
        """Raises LoadRefused, CheckpointError."""
        params = load_parameters(checkpoint, assignment, device=device, dtype=torch.float32)
        return cls(entries_of(assignment), params)

    def operands(self, flat: Tensor) -> Operands:
        """The network's operands for values [N]; gradients flow back to them."""
        sizes = [entry.num_values for entry in self.entries]
        parts: dict[tuple[str, str], Tensor] = {
            (entry.parameter, entry.role): value
            for entry, value in zip(self.entries, torch.split(flat, sizes), strict=True)
        }
        found: dict[str, Tensor | Factored] = dict(self._fixed)
        for (name, role), value in parts.items():
            if role == NORM:
                found[name] = value
        for name, inner in self._inner.items():
            suh, svh = parts[name, "suh"], parts[name, "svh"]
            # Padding lies behind the channels of the weight.
            whole = Factored(suh[: inner.shape[0]], inner, svh[: inner.shape[1]])
            found[name] = whole.weight() if name.endswith(WHOLE) else whole
        return found

    def values(self, offsets: Tensor) -> Tensor:
        """offsets [N] -> what stands in the place of the stored values, float32 [N]."""
        return self.base + self._unit * offsets

    def rounded(self, offsets: Tensor) -> Tensor:
        """The same as it can be stored: each value in the dtype of its tensor, then widened."""
        return torch.cat([part.float() for _, part in self._as_stored(offsets)])

    def stored(self, offsets: Tensor) -> dict[str, Tensor]:
        """Name of each tensor that is tuned -> its new value on the CPU, in its dtype."""
        found: dict[str, Tensor] = {}
        for own, part in self._as_stored(offsets):
            values = torch.split(part.cpu(), [entry.num_values for entry in own])
            for entry, value in zip(own, values, strict=True):
                found[entry.info.name] = value.reshape(entry.info.shape).contiguous()
        return found

    def _as_stored(self, offsets: Tensor) -> Iterator[tuple[list[Entry], Tensor]]:
        """The entries of each dtype and their values in it; none is beyond what it can hold."""
        values, start = self.values(offsets.detach()), 0
        for tag, group in groupby(self.entries, lambda entry: entry.info.dtype):
            own, dtype = list(group), TORCH_DTYPES[tag]
            stop = start + sum(entry.num_values for entry in own)
            largest = torch.finfo(dtype).max
            yield own, values[start:stop].clamp(-largest, largest).to(dtype)
            start = stop

    @staticmethod
    def _stored(entry: Entry, value: Tensor | QuantTensor) -> Tensor:
        return value.parts[entry.role] if isinstance(value, QuantTensor) else value

    def _require_finite(self) -> None:
        whole = self._fixed | self._inner
        bad = [f"{n}: decodes to NaN or infinity" for n, v in whole.items() if not is_finite(v)]
        if bad:
            raise LoadRefused("the candidate", bad, hint="the folder is damaged")


def plain_operands(params: Mapping[str, Tensor | QuantTensor]) -> Operands:
    """The operands of a network of which nothing is tuned, decoded to float32."""
    return {n: v.decode() if isinstance(v, QuantTensor) else v for n, v in params.items()}


def require_tunable(entries: tuple[Entry, ...], where: object) -> None:
    """Raises CheckpointError if no EXL3 matrix of the trunk has scales."""
    if not any(entry.role in SCALES for entry in entries):
        raise CheckpointError(
            f"{where}: no matrix of the trunk is EXL3 with scales .suh and .svh",
            hint="`emberbox compress --recipe base2` makes such a folder",
        )


def _unit(entry: Entry, value: Tensor) -> Tensor:
    """What an offset of one is worth [n]."""
    wide = value.flatten().float()
    if entry.role in SCALES:
        return wide
    return wide.square().mean().sqrt().clamp(min=LEAST_RMS).expand(wide.shape)


def _inner(weight: QuantTensor) -> Tensor:
    """The matrix between the scales, float32 [I, O], padding cut away."""
    outputs, inputs = weight.shape
    rotated = exl3.rotate(exl3.rotate(exl3.inner(weight.parts).float()).T).T
    return rotated[:inputs, :outputs].contiguous()
