"""Kernels of a .cu file on a device: compiled once, loaded once, launched on torch's own stream.

Knows no op. A launch may be captured into a CUDA graph, if its kernel was loaded before.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from emberbox.errors import EnvironmentProblem
from emberbox.ops.build import Source, build

HEADERS = tuple(sorted(Path(__file__).parent.glob("*.cuh")))
THREADS = 256  # of a block, where its kernel says nothing else
WARPS = THREADS // 32
OVERLAP_CAPABILITY = (9, 0)
DEFAULT_SHARED = 40 << 10  # bytes that a block of ours may ask for without more ado
# Values of the macros that name a type (activations.cuh), and those of kernels without float16.
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
STEP_TYPES = {dtype: TYPES[dtype] for dtype in (torch.float32, torch.bfloat16)}
Macros = tuple[tuple[str, int], ...]


class Loaded(Protocol):
    """A cubin on a device; cuda.core's ObjectCode is one."""

    def get_kernel(self, name: str) -> Any:  # noqa: ANN401  cuda.core has no types
        """The kernel of that name."""


def source(path: Path, macros: Mapping[str, int]) -> Source:
    """A .cu file of this folder's ops with its macros."""
    return Source(path, macros, HEADERS)


@dataclass(frozen=True, slots=True)
class Program:
    """A .cu file with its macros on one CUDA device."""

    path: Path
    macros: Macros
    device: torch.device

    def launch(
        self,
        name: str,
        grid: int,
        args: tuple[object, ...],
        shared: int = 0,
        threads: int = THREADS,
    ) -> None:
        """The kernel `name`, `grid` blocks of `threads`, on torch's current stream.

        args: a Tensor is passed as its address, None as a null pointer, float and int as such.
        shared: bytes of dynamic shared memory of a block. From sm_90 on the kernel may start before
        the one before it has ended: it must take its turn (take_turn in gemv.cuh) before it reads
        or writes what another kernel writes or reads. Raises EnvironmentProblem.
        """
        from cuda.bindings import driver

        values, types = zip(*(_passed(arg) for arg in args), strict=True)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        with torch.cuda.device(self.device):
            config.hStream = driver.CUstream(torch.cuda.current_stream(self.device).cuda_stream)
            if torch.cuda.get_device_capability(self.device) >= OVERLAP_CAPABILITY:
                config.attrs, config.numAttrs = [_overlap()], 1
            function = self._function(name, shared)
            (status,) = driver.cuLaunchKernelEx(config, function, (values, types), 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise EnvironmentProblem(
                f"{self.path.name}: {name} could not be launched: {status.name}"
            )

    def load(self, *names: str) -> None:
        """The kernels of those names, so that no launch fails when others have begun."""
        for name in names:
            self._function(name, 0)

    def _function(self, name: str, shared: int) -> object:
        index = self.device.index or 0
        if shared > DEFAULT_SHARED:
            _allow(self.path, self.macros, name, index, shared)
        return _function(self.path, self.macros, name, index)


def arch_of(device: torch.device) -> str:
    """Such as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def settle(device: torch.device) -> None:
    """Wait for what a device was asked for, if it works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of the device."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def _function(path: Path, macros: Macros, name: str, index: int) -> object:
    from cuda.bindings import driver

    return driver.CUfunction(int(_module(path, macros, index).get_kernel(name).handle))


_allowed: dict[tuple[Path, Macros, str, int], int] = {}  # bytes that blocks may ask for


def _allow(path: Path, macros: Macros, name: str, index: int, shared: int) -> None:
    """Let blocks of a kernel ask for so many bytes; never fewer than before. EnvironmentProblem."""
    from cuda.bindings import driver

    key = path, macros, name, index
    if _allowed.get(key, 0) >= shared:
        return
    kernel = driver.CUkernel(int(_module(path, macros, index).get_kernel(name).handle))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, shared, kernel, index)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EnvironmentProblem(
            f"{path.name}: {name} needs {shared} bytes of shared memory for a block, which the "
            f"device refuses ({status.name})"
        )
    _allowed[key] = shared


@cache
def _module(path: Path, macros: Macros, index: int) -> Loaded:
    cubin = build(source(path, dict(macros)), arch_of(torch.device("cuda", index)))
    from cuda.core import Device, ObjectCode

    Device(index).set_current()
    loaded: Loaded = ObjectCode.from_cubin(cubin.read_bytes())
    return loaded


@cache
def _overlap() -> object:
    from cuda.bindings import driver

    attribute: Any = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _passed(arg: object) -> tuple[object, type]:
    """Value and C type of an argument."""
    if isinstance(arg, Tensor):
        return arg.data_ptr(), ctypes.c_void_p
    if arg is None:
        return 0, ctypes.c_void_p
    return (arg, ctypes.c_float) if isinstance(arg, float) else (arg, ctypes.c_int)
