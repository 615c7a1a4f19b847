"""The plain form of the trellis search, for the tests: slow, every step in one line of numpy.

A tile is a ring of 256 windows; neighbours share all but a few bits. Sought: the closed path whose
values lie nearest to the targets. Two passes of Viterbi's algorithm: the first starts half a ring
away with free ends and says through which node the path crosses position 0; the second starts and
ends in that node. Costs are float16: a difference, then a fused multiply-add, each rounded once.
Of equal costs the smaller candidate wins, at the free end the smaller node.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberbox.compress.trellis_steps import (
    FIRST_START,
    Found,
    codebook_values,
    node_bits,
    position_bits,
    targets_by_position,
)
from emberbox.formats.trellis import POSITIONS, WINDOW_BITS

# C candidates of a node (its possible oldest bits), N nodes


def search(tiles: Tensor, num_words: int, codebook: str) -> Found:
    """The path of each tile, float32 [N, 16, 16]. Raises OpError as trellis_steps.Search says."""
    bits, values = position_bits(num_words), codebook_values(codebook).numpy()
    targets = targets_by_position(tiles).cpu().numpy()
    found = [_search_one(target, values, bits) for target in targets]
    windows = torch.tensor([windows for windows, _ in found], dtype=torch.int32)
    cost = torch.tensor([float(cost) for _, cost in found], dtype=torch.float16)
    return Found(windows.view(-1, POSITIONS).to(tiles.device), cost.to(tiles.device))


def _search_one(
    target: NDArray[np.float16], values: NDArray[np.float16], bits: Sequence[int]
) -> tuple[list[int], np.float16]:
    order = np.roll(np.arange(POSITIONS), -FIRST_START)
    start = np.zeros(1 << node_bits(bits[FIRST_START]), np.float16)
    end, choices = _forward(start, target, values, bits, order)
    path = _backward(int(end.argmin()), choices, bits, order)
    crossing = path[0] >> bits[0]

    order = np.arange(POSITIONS)
    start = np.full(1 << node_bits(bits[0]), np.inf, np.float16)
    start[crossing] = 0
    end, choices = _forward(start, target, values, bits, order)
    path = _backward(crossing, choices, bits, order)
    return [path[position] for position in range(POSITIONS)], end[crossing]


def _forward(
    cost: NDArray[np.float16],
    target: NDArray[np.float16],
    values: NDArray[np.float16],
    bits: Sequence[int],
    order: NDArray[np.int64],
) -> tuple[NDArray[np.float16], list[NDArray[np.int64]]]:
    """Costs of the last nodes, and for each step the candidate that each node took."""
    choices = []
    for position in order:
        so_far = np.repeat(cost, 1 << bits[position])  # [65536]: a window continues its high bits
        difference = (values - target[position]).astype(np.float64)
        # Exact in float64 or far from a midpoint of float16: rounded once, as fused.
        reached = (difference * difference + so_far).astype(np.float16)
        by_node = reached.reshape(-1, 1 << node_bits(bits[(position + 1) % POSITIONS]))  # [C, N]
        choices.append(by_node.argmin(0))
        cost = by_node.min(0)
    return cost, choices


def _backward(
    node: int, choices: list[NDArray[np.int64]], bits: Sequence[int], order: NDArray[np.int64]
) -> dict[int, int]:
    """The window of each position on the path that ends in `node`."""
    path = {}
    for position, choice in zip(order[::-1], choices[::-1], strict=True):
        shared = node_bits(bits[(position + 1) % POSITIONS])
        window = int(choice[node]) << shared | node
        path[int(position)] = window
        node = window >> bits[position]
    assert node < 1 << WINDOW_BITS
    return path
