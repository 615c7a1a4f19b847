"""What tests of CUDA kernels need: the device or a skip, and every kernel compiled beforehand."""

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from emberbox.errors import EnvironmentProblem
from emberbox.ops.build import Source, build, default_cache, nvrtc_version

MIN_CAPABILITY = (8, 0)


def gpu_or_skip() -> torch.device:
    """The first CUDA device. Skips where there is none, or none that kernels are written for."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    capability = torch.cuda.get_device_capability(0)
    if capability < MIN_CAPABILITY:
        pytest.skip(f"kernels need compute capability 8.0 or more, the device has {capability}")
    compiler_or_skip()
    return torch.device("cuda", 0)


def compiler_or_skip() -> None:
    """Skips where nothing compiles: tests need no CUDA package."""
    try:
        nvrtc_version()
    except EnvironmentProblem as missing:
        pytest.skip(f"NVRTC is not installed: {missing.message}")


def build_all(sources: Iterable[Source], arch: str) -> list[Path]:
    """Cubins in the cache, as many compiled at once as there are cores. One process compiles one
    at a time, whatever its threads."""
    folder, wanted = default_cache(), list(sources)
    workers = min(os.cpu_count() or 1, len(wanted))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        jobs = [pool.submit(build, source, arch, folder) for source in wanted]
        return [job.result() for job in jobs]
