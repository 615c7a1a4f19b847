"""Routed experts in EXL3 on a GPU, chosen in the first of three launches.

Nothing is copied from the device or waited for.
"""

import torch
from torch import Tensor

from emberbox.ops.contract import require
from emberbox.ops.launch import TYPES
from emberbox.ops.moe_experts.bank import ExpertBank, PlainBank, Projections, bank_of
from emberbox.ops.moe_experts.decode_cuda import (
    MAX_EXPERTS,
    MAX_SLOTS,
    MAX_TOKENS,
    Logits,
    decode,
)
from emberbox.ops.moe_experts.kernel_cuda import moe_experts
from emberbox.ops.moe_routed import reference
from emberbox.ops.route_topk.reference import chosen
from emberbox.ops.swiglu.reference import swiglu

GATHERED_WEIGHTS = 1 << 25  # of one projection
MAX_DECODE = 32  # tokens; more are sorted by expert, as in prefill


def moe_routed(  # noqa: PLR0913  the op's contract
    x: Tensor,
    logits: Tensor,
    bias: Tensor,
    top: int,
    scaling: float,
    projections: Projections,
    limit: float,
) -> Tensor:
    """x [T, H] on a CUDA device; see the op's contract. Raises OpError for another width.

    Plain experts of one shape are gathered by torch. Experts that make no bank, and activations of
    another type than TYPES, are left to the reference.
    """
    bank = bank_of(projections)
    if isinstance(bank, PlainBank):
        return _plain(x, *chosen(logits, bias, top, scaling), bank, limit)
    if not isinstance(bank, ExpertBank) or x.dtype not in TYPES:
        return reference.moe_routed(x, logits, bias, top, scaling, projections, limit)
    _check(x, logits, bias, top, bank)
    if len(x) > MAX_DECODE or top > MAX_SLOTS or len(bank) > MAX_EXPERTS:
        experts, weights = chosen(logits, bias, top, scaling)
        return moe_experts(x, experts, weights, bank, limit)
    x, logits, bias = x.contiguous(), logits.contiguous(), bias.contiguous()
    y, step = torch.empty_like(x), min(MAX_TOKENS, MAX_SLOTS // top)
    for at in range(0, len(x), step):
        piece = slice(at, at + step)
        decode(x[piece], bank, limit, Logits(logits[piece], bias, top, scaling), y[piece])
    return y


def _plain(x: Tensor, experts: Tensor, weights: Tensor, bank: PlainBank, limit: float) -> Tensor:
    """Every token's experts gathered, in pieces of so many weights; as `moe_experts` rounds."""
    gate, up, down = bank.stacked
    step = max(1, GATHERED_WEIGHTS // (experts.shape[1] * gate[0].numel()))
    pieces = []
    for at in range(0, len(x), step):
        rows, own = x[at : at + step, None, :, None], experts[at : at + step]
        g, u = ((matrix[own] @ rows).squeeze(-1) for matrix in (gate, up))
        inner = swiglu(g, u, limit)
        each = (down[own] @ inner.unsqueeze(-1)).squeeze(-1).to(weights.dtype)
        pieces.append((each * weights[at : at + step].unsqueeze(-1)).sum(1).to(x.dtype))
    return torch.cat(pieces)


def _check(x: Tensor, logits: Tensor, bias: Tensor, top: int, bank: ExpertBank) -> None:
    hidden, _ = bank.widths
    shapes = [list(tensor.shape) for tensor in (x, logits, bias)]
    require(
        shapes == [[len(x), hidden], [len(x), len(bank)], [len(bank)]] and 0 < top <= len(bank),
        "moe_routed: x, logits and bias {}, top {}; expected [T, {}], [T, {}], [{}]",
        shapes,
        top,
        hidden,
        len(bank),
        len(bank),
    )
    require(
        logits.dtype is bias.dtype is torch.float32,
        "moe_routed: logits {}, bias {}, expected float32",
        logits.dtype,
        bias.dtype,
    )
