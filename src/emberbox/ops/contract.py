"""What an op promises, and how one implementation is chosen for it. Knows no model.

Each folder beside this file is one op: `__init__.py` holds the contract (`OP`), `reference.py` the
truth in plain torch, `kernel_*.py` faster forms with the same signature.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from emberbox.errors import OpError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A fast version, named by import path: a machine that cannot run it never imports it.

    `ready` names a function that makes of weights, once and at load, what the kernel reads without
    further work; it may return them as they are. `tolerance` is the kernel's own where it rounds
    what the reference does not.
    """

    path: str  # "emberbox.ops.kda_chunk.kernel_torch:kda_chunk"
    device: str  # torch device type it runs on
    min_capability: tuple[int, int] = (0, 0)
    ready: str = ""  # "emberbox.ops.prepared:prepared"
    tolerance: Mapping[torch.dtype, float] | None = None


@dataclass(frozen=True, slots=True)
class Op(Generic[P, R]):
    """A reference, its kernels, and the inputs and tolerances that hold them together.

    `make_inputs(**case, dtype=..., seed=...)` returns keyword arguments of the reference.
    `tolerance` is the relative error (numerics.relative_error) against the reference evaluated on
    float64 copies of the floating-point inputs, per activation dtype. `updates` names the inputs
    that are changed in place, and nothing else is: they count as outputs.
    """

    name: str
    reference: Callable[P, R]
    make_inputs: Callable[..., dict[str, object]]
    cases: tuple[Mapping[str, int], ...]
    tolerance: Mapping[torch.dtype, float]
    updates: tuple[str, ...] = ()
    kernels: Mapping[str, Kernel] = field(default_factory=dict)

    def bind(self, device: torch.device, capability: tuple[int, int] = (0, 0)) -> "Bound[P, R]":
        """Choose once: the first kernel that runs on `device`, otherwise the reference."""
        for name, kernel in self.kernels.items():
            if kernel.device == device.type and capability >= kernel.min_capability:
                ready = _imported(kernel.ready) if kernel.ready else None
                return Bound(name, self.load(name), ready)
        return Bound("reference", self.reference)

    def tolerance_of(self, name: str, dtype: torch.dtype) -> float:
        """The largest relative error of the kernel called `name`, or of the "reference"."""
        own = self.kernels[name].tolerance if name in self.kernels else None
        return (self.tolerance if own is None else own)[dtype]

    def load(self, name: str) -> Callable[P, R]:
        """Import the kernel called `name`. Raises OpError if this op has none of that name."""
        if name not in self.kernels:
            known = ", ".join(self.kernels) or "none"
            raise OpError(f"{self.name}: no kernel {name!r}", hint=f"kernels of this op: {known}")
        return cast("Callable[P, R]", _imported(self.kernels[name].path))


@dataclass(frozen=True, slots=True)
class Bound(Generic[P, R]):
    """The implementation chosen for an op, its name for the op table, and its kernel's `ready`."""

    name: str
    function: Callable[P, R]
    ready: Callable[[Any], Any] | None = None


def _imported(path: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    return cast("Callable[..., Any]", getattr(import_module(module), attribute))


def require(condition: bool, message: str, *values: object) -> None:
    """Raise OpError(message.format(*values)) unless `condition` holds."""
    if not condition:
        raise OpError(message.format(*values))


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise OpError unless the tensor is contiguous and as it is said to be.

    Weights are held to it rather than converted: a kernel reads them before its turn (take_turn in
    gemv.cuh), when what was written just before may not be seen.
    """
    require(
        tensor.shape == shape and tensor.dtype in dtypes and tensor.is_contiguous(),
        "{} is {} of {}, expected {} of {}, contiguous",
        *(name, tuple(tensor.shape), tensor.dtype, shape, " or ".join(map(str, dtypes))),
    )
