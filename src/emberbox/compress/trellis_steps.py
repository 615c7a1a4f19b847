"""What all trellis searches agree on: order of positions, bits per position, range of targets.

Knows no arithmetic of a search and no matrices.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from emberbox.errors import OpError
from emberbox.formats.codebooks import CODEBOOKS
from emberbox.formats.trellis import POSITIONS, RATES, TILE, WINDOW_BITS, element_order

# Targets are cut to this size: 256 steps of (11.5 + 3.98)^2 stay below 65504, so no cost overflows
# float16. Values of a codebook end at 3.98; a rotated weight has rms 1.25, so this is 9 sigma.
TARGET_LIMIT = 11.5
# The first pass starts here, half a ring away from where the second starts and ends.
FIRST_START = POSITIONS // 2


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The path that was found for each of N tiles, on the tiles' device."""

    windows: Tensor  # int32 [N, 256] by position
    cost: Tensor  # float16 [N] as the search summed it, not the exact squared error


# search(tiles float32 [N, 16, 16] (row = input channel), words of a tile, codebook). All searches
# find the same windows. OpError for tiles of other shapes or dtypes or with a value that is not
# finite, for an unknown rate or codebook.
Search = Callable[[Tensor, int, str], Found]


def position_bits(num_words: int) -> tuple[int, ...]:
    """The ring bits that each of the 256 positions owns."""
    if num_words not in RATES:
        raise OpError(f"trellis: tiles of {num_words} words, expected one of {sorted(RATES)}")
    return RATES[num_words] * (POSITIONS // 2)


def node_bits(own_bits: int) -> int:
    """A node is what a window shares with the one before it."""
    return WINDOW_BITS - own_bits


def codebook_values(name: str, device: torch.device | str = "cpu") -> Tensor:
    """float16 [65536]: the value of every window."""
    if name not in CODEBOOKS:
        raise OpError(f"trellis search: codebook {name!r}, expected one of {sorted(CODEBOOKS)}")
    return CODEBOOKS[name].values(device)


def targets_by_position(tiles: Tensor) -> Tensor:
    """float32 [N, 16, 16] -> float16 [N, 256] by position, cut to TARGET_LIMIT."""
    if tiles.dtype != torch.float32 or tiles.shape[1:] != (TILE, TILE):
        raise OpError(
            f"trellis search: tiles {tiles.dtype} {list(tiles.shape)}, "
            f"expected float32 [N, {TILE}, {TILE}]"
        )
    if not tiles.isfinite().all():
        raise OpError("trellis search: a tile holds a value that is not finite")
    flat = tiles.reshape(-1, POSITIONS).clamp(-TARGET_LIMIT, TARGET_LIMIT).half()
    by_position = torch.empty_like(flat)
    by_position[:, element_order(str(tiles.device))] = flat
    return by_position
