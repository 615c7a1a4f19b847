"""Accepted drafts of every layer and sequence, one after another."""

import torch
from torch import Tensor

from emberbox.ops.kda_commit.reference import kda_commit


def kda_apply(
    states: Tensor,
    history: Tensor,
    pending: tuple[Tensor, Tensor, Tensor, Tensor],
    slots: Tensor,
    accepted: Tensor,
) -> None:
    M = pending[0].shape[1] // len(slots)
    for index, (slot, count) in enumerate(zip(slots.tolist(), accepted.tolist(), strict=True)):
        rows = slice(index * M + 1, index * M + 1 + count)
        for layer in range(len(states) if count else 0):
            conv, k, gate, deltas = (each[layer, rows] for each in pending)
            states[layer, slot] = kda_commit(k, deltas, gate, states[layer, slot])
            history[layer, slot] = torch.cat([history[layer, slot], conv])[count:]
