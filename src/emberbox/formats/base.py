"""What stored bytes of a linear weight mean: `Format` describes a scheme, `QuantTensor` holds one.

A weight has shape (out, in). A format is data: named parts, each with the suffix it has in a
checkpoint, and three functions. `decode` is the definition of truth. Plain torch on any device;
knows no files and no kernels.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from emberbox.errors import OpError
from emberbox.formats.dtypes import DTYPE_TAGS

Shape: TypeAlias = tuple[int, int]  # (out, in)
ShapePattern: TypeAlias = tuple[int | None, ...]  # None: any size


class StoredTensor(Protocol):
    """What a format must know of a tensor in a file; `store`'s TensorInfo is one."""

    @property
    def dtype(self) -> str:
        """Safetensors tag."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major."""


class ExpectedPart(NamedTuple):
    """Dtype tags and shape that one stored part may have."""

    dtypes: tuple[str, ...]
    shape: ShapePattern


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a format: `<prefix><suffix>`, in one of `dtypes`.

    is_scalar: a single number, whether stored with shape [] or [1].
    """

    suffix: str
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False
    is_scalar: bool = False


def _nothing_more(parts: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Format:
    """A way to store a linear weight. Compared by identity.

    parts: part name -> Part.
    bits: nominal bits per weight, scales included (QuantTensor.num_bytes is exact); None where the
        stored tensors decide.
    multiple: what (out, in) must be divisible by.
    part_shapes: (out, in) -> shape of each part; None where the stored tensor decides a size.
    decode: parts, (out, in) -> float32 [out, in].
    encode: float [out, in] -> parts; raises OpError where a weight alone is not enough.
    check: what parts that fit singly may not be together -> sentences that start with a suffix.
    is_plain: decoding is a cast, so that a loader may hand on a Tensor instead of a QuantTensor.
    """

    name: str
    parts: Mapping[str, Part]
    bits: float | None
    multiple: Shape
    part_shapes: Callable[[Shape], Mapping[str, ShapePattern]]
    decode: Callable[[Mapping[str, Tensor], Shape], Tensor]
    encode: Callable[[Tensor], dict[str, Tensor]]
    check: Callable[[Mapping[str, StoredTensor]], Iterable[str]] = _nothing_more
    is_plain: bool = False

    def quantize(self, weight: Tensor) -> "QuantTensor":
        """Encode a float [out, in] weight."""
        if weight.dim() != 2 or not weight.is_floating_point():
            raise OpError(
                f"{self.name}: expected a floating-point [out, in] weight, got {weight.dtype} "
                f"{list(weight.shape)}"
            )
        out_features, in_features = weight.shape
        return QuantTensor(self, self.encode(weight), (out_features, in_features))

    def part_names(self, prefix: str) -> dict[str, str]:
        """Part name -> name in a checkpoint, optional parts included."""
        return {part: prefix + spec.suffix for part, spec in self.parts.items()}

    def expected_parts(self, prefix: str, shape: Shape) -> dict[str, ExpectedPart]:
        """Name in a checkpoint -> what it must look like, optional parts included."""
        shapes = self.part_shapes(shape)
        return {
            prefix + spec.suffix: ExpectedPart(
                tuple(DTYPE_TAGS[dtype] for dtype in spec.dtypes), shapes[part]
            )
            for part, spec in self.parts.items()
        }

    def problems(self, prefix: str, shape: Shape, infos: Mapping[str, StoredTensor]) -> list[str]:
        """Every reason why the tensors under `prefix` are not a weight of (out, in) = `shape`."""
        found = self._indivisible(prefix, shape)
        held = {}
        for (key, part), (name, expected) in zip(
            self.parts.items(), self.expected_parts(prefix, shape).items(), strict=True
        ):
            if name in infos:
                held[key] = infos[name]
                if not (part.is_scalar and held[key].shape == (1,)):
                    found += _differences(name, held[key], expected)
            elif not part.optional:
                found.append(f"{name}: missing (part of {self.name})")
        if all(key in held for key, part in self.parts.items() if not part.optional):
            found += [prefix + sentence for sentence in self.check(held)]
        return found

    def _indivisible(self, where: str, shape: Shape) -> list[str]:
        if any(size % step for size, step in zip(shape, self.multiple, strict=True)):
            return [
                f"{where}: shape {list(shape)} is not a multiple of {list(self.multiple)}, "
                f"as {self.name} requires"
            ]
        return []


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """A weight of `shape` (out, in) stored as the `parts` of `format`, all on one device.

    Construction checks names, dtypes and shapes; OpError says everything that differs.
    """

    format: Format
    parts: Mapping[str, Tensor]
    shape: Shape

    def __post_init__(self) -> None:
        unknown = sorted(self.parts.keys() - self.format.parts.keys())
        stored = {
            self.format.parts[part].suffix: _Described(tensor)
            for part, tensor in self.parts.items()
            if part in self.format.parts
        }
        problems = [f"{part}: not a part of {self.format.name}" for part in unknown]
        problems += self.format.problems("", self.shape, stored)
        if len({tensor.device for tensor in self.parts.values()}) > 1:
            problems.append("parts are on different devices")
        if problems:
            raise OpError(f"{self.format.name} weight of {self.shape}: {'; '.join(problems)}")
        object.__setattr__(self, "parts", MappingProxyType(dict(self.parts)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(tensor.nbytes for tensor in self.parts.values())

    @property
    def device(self) -> torch.device:
        """Where all parts are."""
        return next(iter(self.parts.values())).device

    def decode(self) -> Tensor:
        """The weight, float32 [out, in]."""
        return self.format.decode(self.parts, self.shape)

    def to(self, device: torch.device | str) -> "QuantTensor":
        """The same weight on `device`."""
        moved = {part: tensor.to(device) for part, tensor in self.parts.items()}
        return QuantTensor(self.format, moved, self.shape)


class _Described:
    """A tensor in memory, seen as a stored one."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = DTYPE_TAGS.get(tensor.dtype, str(tensor.dtype))
        self.shape = tuple(tensor.shape)


def _differences(name: str, info: StoredTensor, expected: ExpectedPart) -> list[str]:
    found = []
    if info.dtype not in expected.dtypes:
        found.append(f"{name}: dtype {info.dtype}, expected {' or '.join(expected.dtypes)}")
    fits = len(info.shape) == len(expected.shape) and all(
        want is None or size == want for size, want in zip(info.shape, expected.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in expected.shape)
        found.append(f"{name}: shape {list(info.shape)}, expected [{wanted}]")
    return found
