"""The trellis search on a GPU: the same paths and costs as trellis_search_numpy.

A block of the kernel searches two tiles at a time where the rate and the architecture leave room,
else one. As many blocks run as the GPU has multiprocessors, each with scratch memory of its own,
reused from tile to tile, whatever their number: 1 MiB per multiprocessor, 2 MiB with two tiles or
at 3.5 bits (264 MiB at most on the 132 multiprocessors of an H200).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberbox.compress.trellis_steps import (
    Found,
    codebook_values,
    position_bits,
    targets_by_position,
)
from emberbox.errors import EnvironmentProblem, OpError
from emberbox.formats.trellis import POSITIONS, RATES, WINDOW_BITS
from emberbox.ops.build import Source, build

KERNEL = Path(__file__).with_name("trellis_search.cu")
BOOKS = KERNEL.with_name("trellis_books.cuh")
NUM_THREADS = 1024
# Up to so many own bits a thread keeps the values of its windows in registers.
MAX_BITS_IN_REGISTERS = 3
STAGED_BYTES = 65536
SMALL_BYTES = 4 * 32 + 16
# Dynamic shared memory that a block may ask for; every other architecture has at least the last.
SHARED_LIMITS: Mapping[str, int] = {"sm_90": 232_448, "sm_100": 232_448, "sm_103": 232_448}
SMALLEST_SHARED_LIMIT = 101_376


@dataclass(frozen=True, slots=True)
class Shape:
    """What a block of the kernel needs, for one rate on one architecture."""

    even: int
    odd: int
    num_tiles: int
    num_buffers: int
    values_in_shared: bool

    @staticmethod
    def choose(even: int, odd: int, arch: str) -> "Shape":
        """Two tiles at once, costs twice and values in shared memory: of these what fits.

        On an H200 each is faster than doing without. Architectures with little (sm_121) read values
        from outside from 3.5 bits on, and keep costs only once below 2 bits.
        """
        limit = SHARED_LIMITS.get(arch, SMALLEST_SHARED_LIMIT)
        choices = ((2, 2, True), (1, 2, True), (1, 2, False), (1, 1, False))
        shapes = [Shape(even, odd, *choice) for choice in choices]
        return next(
            shape
            for shape in shapes
            if shape.shared_bytes <= limit and (shape.num_tiles == 1 or shape.in_registers)
        )

    @property
    def in_registers(self) -> bool:
        return max(self.even, self.odd) <= MAX_BITS_IN_REGISTERS

    @property
    def shared_bytes(self) -> int:
        costs = self.num_tiles * self.num_buffers * (2 << (WINDOW_BITS - min(self.even, self.odd)))
        small = 4 * POSITIONS * self.num_tiles + SMALL_BYTES
        if self.in_registers:
            return max(costs, STAGED_BYTES) + small
        values = 2 << WINDOW_BITS if self.values_in_shared else 0
        return values + costs + STAGED_BYTES + small

    @property
    def scratch_bytes(self) -> int:
        """History of the block's tiles: a word per thread, or a byte per node."""
        num_nodes = 0 if self.in_registers else 1 << (WINDOW_BITS - min(self.even, self.odd))
        return self.num_tiles * POSITIONS * max(4 * NUM_THREADS, num_nodes)

    def source(self) -> Source:
        return Source(
            KERNEL,
            {
                "D_EVEN": self.even,
                "D_ODD": self.odd,
                "TILES": self.num_tiles,
                "NUM_BUFFERS": self.num_buffers,
                "VALUES_IN_SHARED": int(self.values_in_shared),
                "SHARED_BYTES": self.shared_bytes,
                "SCRATCH_BYTES": self.scratch_bytes,
            },
            (BOOKS,),
        )


def sources(arch: str) -> list[Source]:
    """What a search builds on an architecture, one for each rate."""
    return [Shape.choose(even, odd, arch).source() for even, odd in RATES.values()]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel on one device."""

    kernel: Any
    shape: Shape
    num_blocks: int


def check(device: str) -> None:
    """Build and load the kernel of every rate. Raises EnvironmentProblem where that fails."""
    index = torch.device(device).index or 0
    for even, odd in RATES.values():
        load(Shape.choose(even, odd, _arch(index)), index)


def search(tiles: Tensor, num_words: int, codebook: str) -> Found:
    """The path of each tile, float32 [N, 16, 16] on a CUDA device (row = input channel).

    Raises OpError for tiles elsewhere, of another shape or not finite, for an unknown rate or
    codebook; EnvironmentProblem where the kernel cannot be built.
    """
    if tiles.device.type != "cuda":
        raise OpError(f"trellis search: tiles on {tiles.device}, expected a CUDA device")
    even, odd = position_bits(num_words)[:2]
    return search_as(Shape.choose(even, odd, _arch(tiles.device.index)), tiles, codebook)


def search_as(shape: Shape, tiles: Tensor, codebook: str) -> Found:
    """The search with a chosen shape of the kernel's blocks; all shapes find the same."""
    targets = targets_by_position(tiles).contiguous()
    values = codebook_values(codebook, tiles.device)
    windows = torch.empty(len(targets), POSITIONS, dtype=torch.int32, device=tiles.device)
    cost = torch.empty(len(targets), dtype=torch.float16, device=tiles.device)
    if len(targets):
        loaded = load(shape, tiles.device.index)
        num_blocks = min(-(-len(targets) // shape.num_tiles), loaded.num_blocks)
        num_bytes = num_blocks * shape.scratch_bytes
        scratch = torch.empty(num_bytes, dtype=torch.uint8, device=tiles.device)
        _launch(loaded, num_blocks, (targets, values, windows, cost, scratch))
    return Found(windows, cost)


def _launch(loaded: Loaded, num_blocks: int, tensors: tuple[Tensor, ...]) -> None:
    """On torch's current stream: memory freed behind the launch is reused only after it."""
    import numpy as np
    from cuda.core import Device, LaunchConfig, Stream, launch

    device = tensors[0].device
    with torch.cuda.device(device):
        Device(device.index).set_current()
        stream = Stream.from_handle(torch.cuda.current_stream(device).cuda_stream)
        config = LaunchConfig(
            grid=num_blocks, block=NUM_THREADS, shmem_size=loaded.shape.shared_bytes
        )
        pointers = [tensor.data_ptr() for tensor in tensors]
        launch(stream, config, loaded.kernel, *pointers, np.int32(len(tensors[0])))


@cache
def load(shape: Shape, device_index: int) -> Loaded:
    """The kernel of a shape on a device, built if the cache does not hold it."""
    arch = _arch(device_index)
    cubin = build(shape.source(), arch)
    from cuda.bindings import driver
    from cuda.core import Device, ObjectCode

    Device(device_index).set_current()
    kernel = ObjectCode.from_cubin(cubin.read_bytes()).get_kernel("trellis_search")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = driver.CUkernel(int(kernel.handle))
    (status,) = driver.cuKernelSetAttribute(attribute, shape.shared_bytes, handle, device_index)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EnvironmentProblem(
            f"trellis search: {arch} refuses {shape.shared_bytes} bytes of shared memory ({status})"
        )
    count = torch.cuda.get_device_properties(device_index).multi_processor_count
    return Loaded(kernel, shape, count)


def _arch(device_index: int) -> str:
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"sm_{major}{minor}"
