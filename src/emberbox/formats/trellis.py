"""Tiles of EXL3: 256 weights in a ring of bits, each the window of 16 bits that ends with its own.

A tile of 16 x 16 weights is a row of 16-bit words; their number, 16 times the bits per weight, says
how the ring is cut. There is no start state: the first windows reach back to the end of the ring,
so any bytes are a valid tile. Exact and on integers; knows no scales and no matrices.
"""

from collections.abc import Mapping
from functools import cache
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from emberbox.errors import OpError
from emberbox.formats.codebooks import Codebook

# n words of a tile, ... any leading dimensions
TILE = 16
POSITIONS = TILE * TILE
WINDOW_BITS = 16
WINDOW_MASK = 0xFFFF

# Words of a tile -> bits that an even and an odd position own: whole rates 1 to 8, then half rates.
RATES: Mapping[int, tuple[int, int]] = MappingProxyType(
    {16 * k: (k, k) for k in range(1, 9)} | {16 * k + 8: (k, k + 1) for k in (1, 2, 3)}
)


def is_half_rate(num_words: int) -> bool:
    """Whether even and odd positions own different numbers of bits."""
    even, odd = RATES[num_words]
    return even != odd


def unpack(packed: Tensor) -> Tensor:
    """int16 [..., n] of a stored tile -> windows int32 [..., 256] by position, each 0 to 65535."""
    return _windows(packed, *_cuts(packed.shape[-1], str(packed.device)))


def pack(windows: Tensor, num_words: int) -> Tensor:
    """Windows int [..., 256] by position -> int16 [..., n].

    Raises OpError where neighbours, the last and the first among them, do not share their bits.
    """
    _check_rate(num_words)
    owner, shift = _owners(num_words, str(windows.device))
    bits = (windows.to(torch.int32)[..., owner] >> shift) & 1  # [..., 16 n] in ring order
    weights = 1 << torch.arange(WINDOW_BITS - 1, -1, -1, dtype=torch.int32, device=bits.device)
    halves = (_split_last(bits, num_words, WINDOW_BITS) * weights).sum(-1, dtype=torch.int32)
    packed = _swapped(halves).to(torch.int16)
    if not torch.equal(unpack(packed), windows.to(torch.int32)):
        raise OpError("trellis: the windows to pack are not a closed path, neighbours disagree")
    return packed


def decode_tiles(packed: Tensor, codebook: Codebook) -> Tensor:
    """int16 [..., n] -> float16 [..., 16, 16], row = input channel, column = output channel."""
    device = str(packed.device)
    order = element_order(device)
    word, shift = _cuts(packed.shape[-1], device)
    windows = _windows(packed, word[order], shift[order])
    return _split_last(codebook.values(packed.device)[windows], TILE, TILE)


@cache
def element_order(device: str = "cpu") -> Tensor:
    """int64 [256]: the position of each element of a tile, row by row.

    Eight consecutive positions are what one lane of a 16 x 8 x 16 tensor-core product holds of its
    B operand, for two such products side by side.
    """
    position = torch.arange(POSITIONS)
    lane, slot = position // 8, position % 8
    row = 2 * (lane % 4) + slot % 2 + 8 * (slot // 2 % 2)
    column = lane // 4 + 8 * (slot // 4)
    order = torch.zeros(POSITIONS, dtype=torch.int64)
    order[row * TILE + column] = position
    return order.to(device)


def _windows(packed: Tensor, word: Tensor, shift: Tensor) -> Tensor:
    halves = _swapped(packed.to(torch.int32) & WINDOW_MASK)
    # Each 16 bits behind the 16 before them: every window lies inside one such pair. The sign bit
    # that the shift drags in stays above the mask.
    pairs = (halves.roll(1, -1) << WINDOW_BITS) | halves
    return (pairs[..., word] >> shift) & WINDOW_MASK


def _swapped(words: Tensor) -> Tensor:
    """Ring order <-> stored order: the halves of each little-endian 32-bit word change places."""
    return _split_last(words, words.shape[-1] // 2, 2).flip(-1).flatten(-2)


def _split_last(x: Tensor, *sizes: int) -> Tensor:
    return x.reshape(*x.shape[:-1], *sizes)


def _ends(num_words: int) -> list[int]:
    """Ring bit after the last own bit of each position."""
    even, odd = RATES[num_words]
    return list(accumulate((even, odd) * (POSITIONS // 2)))


@cache
def _cuts(num_words: int, device: str) -> tuple[Tensor, Tensor]:
    """For each position the 16-bit ring word with its window's last bit, and the bits after it."""
    _check_rate(num_words)
    ends = torch.tensor(_ends(num_words))
    word = (ends - 1) // WINDOW_BITS
    shift = (word + 1) * WINDOW_BITS - ends
    return word.to(device), shift.to(device, torch.int32)


@cache
def _owners(num_words: int, device: str) -> tuple[Tensor, Tensor]:
    """For each ring bit the position that owns it, and its place in that position's window."""
    ends = torch.tensor(_ends(num_words))
    bit = torch.arange(num_words * WINDOW_BITS)
    owner = torch.searchsorted(ends, bit, right=True)
    return owner.to(device), (ends[owner] - 1 - bit).to(device, torch.int32)


def _check_rate(num_words: int) -> None:
    if num_words not in RATES:
        raise OpError(f"trellis: tiles of {num_words} words, expected one of {sorted(RATES)}")
