"""Routed experts in EXL3 on a GPU: a few tokens in three launches, many by sorted tiles.

Experts and their projections may differ in rate and codebook: each pair of these is a launch of its
own, in which the blocks of other experts end at once. Nothing waits for the GPU.
"""

import torch
from torch import Tensor

from emberbox.ops.contract import require
from emberbox.ops.linear_exl3.kernel_cuda import X_TYPES
from emberbox.ops.moe_experts import reference
from emberbox.ops.moe_experts.bank import Projections, bank_of
from emberbox.ops.moe_experts.decode_cuda import MAX_SLOTS, MAX_TOKENS, Chosen, decode
from emberbox.ops.moe_experts.prefill_cuda import prefill

PREFILL_TOKENS = 4096  # at once: 1.9 GB of working memory at the released shapes and 8 experts


def moe_experts(
    x: Tensor, experts: Tensor, weights: Tensor, projections: Projections, limit: float
) -> Tensor:
    """x [T, H] float32, float16 or bfloat16 on a CUDA device; see the op's contract.

    Experts that are not all prepared (ops.prepared) go through the reference.
    """
    bank = bank_of(projections)
    if bank is None:
        return reference.moe_experts(x, experts, weights, tuple(projections), limit)
    require(x.dtype in X_TYPES, "moe_experts: x is {}, expected one of {}", x.dtype, list(X_TYPES))
    require(
        x.shape[-1] == bank.widths[0],
        "moe_experts: x has {} channels, the experts {}",
        x.shape[-1],
        bank.widths[0],
    )
    x, experts, weights = x.contiguous(), experts.contiguous(), weights.float().contiguous()
    if len(x) <= MAX_TOKENS and experts.numel() <= MAX_SLOTS:
        return decode(x, bank, limit, Chosen(experts, weights))
    pieces = [
        prefill(x[at:end], experts[at:end], weights[at:end], bank, limit)
        for at, end in _cuts(len(x))
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _cuts(num_tokens: int) -> list[tuple[int, int]]:
    return [(at, at + PREFILL_TOKENS) for at in range(0, num_tokens, PREFILL_TOKENS)]
