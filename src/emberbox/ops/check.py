"""Kernels against their references on the machine at hand, for tests and `emberbox doctor`.

A reference is evaluated on the CPU, on float64 copies of the inputs. Knows no op by name but
`linear`, which products with a weight in any format answer to.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emberbox.formats.base import QuantTensor
from emberbox.ops.contract import Op
from emberbox.ops.numerics import first_mismatch, relative_error
from emberbox.ops.table import OPS


@dataclass(frozen=True, slots=True)
class Checked:
    """One case of a kernel: the relative error of its worst output, and what is allowed.

    `mismatch` names the first element that is further off, or is empty.
    """

    op: str
    kernel: str
    case: Mapping[str, int]
    dtype: torch.dtype
    error: float
    tolerance: float
    mismatch: str = ""

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance


def check_kernels(device: torch.device, capability: tuple[int, int] = (0, 0)) -> Iterator[Checked]:
    """Every case and dtype of every kernel that `bind` would choose on the device."""
    for op in OPS.values():
        name = op.bind(device, capability).name
        if name in op.kernels:
            for dtype in op.tolerance:
                for case in op.cases:
                    yield check_case(op, name, case, dtype, device)


def check_case(
    op: Op[..., Any],
    kernel: str | None,
    case: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Checked:
    """One case; the reference itself where `kernel` is None. Raises what the kernel raises."""
    inputs = op.make_inputs(**case, dtype=dtype)
    expected = [*tensors(expected_of(op, inputs))]
    here = {name: moved(value, device) for name, value in inputs.items()}
    function = op.reference if kernel is None else op.load(kernel)
    found = [*tensors((function(**here), [here[name] for name in op.updates]))]
    tolerance = op.tolerance_of(kernel or "reference", dtype)
    errors = [difference(f, e) for f, e in zip(found, expected, strict=True)]
    worst = max(range(len(errors)), key=lambda i: errors[i])
    said = ""
    if errors[worst] > tolerance and found[worst].shape == expected[worst].shape:
        said = first_mismatch(found[worst].cpu(), expected[worst], tolerance)
    return Checked(op.name, kernel or "reference", case, dtype, errors[worst], tolerance, said)


def difference(found: Tensor, expected: Tensor) -> float:
    """relative_error on the CPU; infinite where one is of integers and the other is not."""
    if found.is_floating_point() != expected.is_floating_point():
        return float("inf")
    return relative_error(found.cpu(), expected)


def expected_of(op: Op[..., Any], inputs: Mapping[str, object]) -> tuple[object, list[object]]:
    """What the reference gives for float64 copies of `inputs`, and the inputs it updates."""
    wide = {name: widened(value) for name, value in inputs.items()}
    # A decoded weight is a plain one: products with any format answer to the plain product.
    function = OPS["linear"].reference if op.name.startswith("linear_") else op.reference
    return function(**wide), [wide[name] for name in op.updates]


def widened(value: object) -> object:
    """float64 copies of floating-point tensors and decoded weights, everything else as it is."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, QuantTensor):
        return value.decode().double()
    return tuple(widened(item) for item in value) if isinstance(value, tuple) else value


def moved(value: object, device: torch.device) -> object:
    """Tensors and weights on `device`, everything else as it is."""
    if isinstance(value, Tensor | QuantTensor):
        return value.to(device)
    return tuple(moved(item, device) for item in value) if isinstance(value, tuple) else value


def tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in nested results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, QuantTensor):
        yield from value.parts.values()
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
