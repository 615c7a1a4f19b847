"""The trellis search for a CPU with numba: the same paths and costs as trellis_search_numpy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberbox.compress.trellis_steps import (
    Found,
    codebook_values,
    position_bits,
    targets_by_position,
)
from emberbox.errors import EnvironmentProblem
from emberbox.formats.trellis import POSITIONS


def search(tiles: Tensor, num_words: int, codebook: str) -> Found:
    """The path of each tile, float32 [N, 16, 16]; tiles of another device are copied here and back.

    Raises OpError as trellis_steps.Search says, EnvironmentProblem where numba is missing.
    """
    targets = targets_by_position(tiles).float().cpu().numpy()
    even, odd = position_bits(num_words)[:2]
    windows = np.empty((len(targets), POSITIONS), np.int32)
    cost = np.empty(len(targets), np.float32)
    if len(targets):
        with _torch_threads_kept():
            search_kernel, num_threads = kernel()
            values = (_ordered(codebook, even, odd), _ordered(codebook, odd, even))
            search_kernel(*values, np.array([even, odd]), targets, (windows, cost), num_threads)
    found = torch.from_numpy(windows), torch.from_numpy(cost).half()
    return Found(*(part.to(tiles.device) for part in found))


@contextmanager
def _torch_threads_kept() -> Iterator[None]:
    """Both may run on one OpenMP, where numba leaves its own number of threads behind.

    With another number torch's sums have other last bits.
    """
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@cache
def _ordered(codebook: str, own_bits: int, next_bits: int) -> NDArray[np.float32]:
    """Values of all windows in the order of the kernel's step: [C, L, H] or [C, H, L]."""
    from emberbox.compress.kernel_numba import MIN_BITS_BY_LOW

    values = codebook_values(codebook).float().numpy()
    parts = values.reshape(1 << next_bits, -1, 1 << own_bits)
    return np.ascontiguousarray(parts.swapaxes(1, 2) if own_bits < MIN_BITS_BY_LOW else parts)


@cache
def kernel() -> tuple[Callable[..., None], int]:
    """The compiled search and how many threads it may use."""
    try:
        import numba

        from emberbox.compress import kernel_numba
    except ImportError as missing:
        raise EnvironmentProblem(
            f"the trellis search on a CPU needs numba ({missing})",
            hint="pip install 'emberbox[compress]'",
        ) from missing
    except RuntimeError as unwritable:
        # numba keeps its machine code beside the source as Python does its bytecode or, where that
        # is read-only, in the user's cache folder; NUMBA_CACHE_DIR comes before both. With none
        # that can be written it refuses. So do we: every run would compile for ten seconds.
        raise EnvironmentProblem(
            f"the trellis search on a CPU has no folder for its compiled code ({unwritable})",
            hint="set NUMBA_CACHE_DIR to a folder that can be written",
        ) from unwritable
    return kernel_numba.search, numba.get_num_threads()
