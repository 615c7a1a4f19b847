"""Routed experts in EXL3 on a GPU: a few tokens in three launches, many by sorted tiles.

Experts and their projections may differ in rate and codebook: each pair of these is a launch of its
own, in which the blocks of other experts end at once. Nothing waits for the GPU.
"""

import torch
from torch import Tensor

from emberbox.ops.contract import require
from emberbox.ops.launch import TYPES
from emberbox.ops.moe_experts import PREFILL_TOKENS, reference
from emberbox.ops.moe_experts.bank import ExpertBank, Projections, bank_of
from emberbox.ops.moe_experts.decode_cuda import MAX_SLOTS, MAX_TOKENS, Chosen, decode
from emberbox.ops.moe_experts.prefill_cuda import prefill


def moe_experts(
    x: Tensor, experts: Tensor, weights: Tensor, projections: Projections, limit: float
) -> Tensor:
    """x [T, H] on a CUDA device; see the op's contract. Raises OpError for another width.

    Experts that make no bank, and activations of another type than TYPES, are left to the
    reference.
    """
    bank = bank_of(projections)
    if not isinstance(bank, ExpertBank) or x.dtype not in TYPES:
        return reference.moe_experts(x, experts, weights, projections, limit)
    hidden, _ = bank.widths
    require(
        x.shape[-1] == hidden,
        "moe_experts: x has {} channels, the experts {}",
        x.shape[-1],
        hidden,
    )
    require(
        experts.shape == weights.shape == (len(x), experts.shape[-1]),
        "moe_experts: {} tokens, experts {} and weights {}; expected [T, k] of both",
        *(len(x), list(experts.shape), list(weights.shape)),
    )
    x, experts, weights = x.contiguous(), experts.long().contiguous(), weights.float().contiguous()
    if len(x) <= MAX_TOKENS and experts.numel() <= MAX_SLOTS:
        return decode(x, bank, limit, Chosen(experts, weights))
    pieces = [
        prefill(x[at:end], experts[at:end], weights[at:end], bank, limit)
        for at, end in _cuts(len(x))
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _cuts(num_tokens: int) -> list[tuple[int, int]]:
    return [(at, at + PREFILL_TOKENS) for at in range(0, num_tokens, PREFILL_TOKENS)]
