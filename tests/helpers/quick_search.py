"""Stands for a trellis search where a test asks nothing of quality: closed paths in milliseconds.

From the first position to the last each tile takes the nearest of the values that it can reach next
(a search compares 65,536). The last positions are zero, so that the ring closes.
"""

import torch
from torch import Tensor

from emberbox.compress.trellis_steps import (
    Found,
    codebook_values,
    position_bits,
    targets_by_position,
)
from emberbox.formats.trellis import POSITIONS, WINDOW_BITS


def quick_search(tiles: Tensor, num_words: int, codebook: str) -> Found:
    """As trellis_steps.Search; `cost` is exact."""
    targets, values = targets_by_position(tiles), codebook_values(codebook, tiles.device)
    window = torch.zeros(len(tiles), dtype=torch.int64, device=tiles.device)
    windows, left = [], sum(position_bits(num_words))
    for position, own_bits in enumerate(position_bits(num_words)):
        left -= own_bits
        shifted = (window << own_bits) & ((1 << WINDOW_BITS) - 1)
        reached = shifted[:, None] + torch.arange(1 << own_bits, device=tiles.device)
        distance = (values[reached].float() - targets[:, position, None].float()).abs()
        # The first window of a ring begins with its last bits: those are zero here.
        choice = distance.argmin(1) if left >= WINDOW_BITS else 0
        window = shifted + choice
        windows.append(window)
    found = torch.stack(windows, 1).to(torch.int32).view(-1, POSITIONS)
    lost = values[found].float() - targets.float()
    return Found(found, lost.square().sum(1).half())
