"""Sparse latent attention as a mask over dense scores, and the loss of its indexer.

Architecture.md 3.3, 3.4. The indexer learns from its layer's own dense attention: the KL from what
that attention gives each complete pool to the softmax of the pool scores. No other gradient
reaches it, and none leaves it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from training.context import Context, Rows

# B rows, T tokens each, H heads, P = T / pool pools of a row, D width of the thing at hand
INDEX_NORM_EPS = 1e-6
MASKED = -3e4  # below every logit in bfloat16, and finite


@dataclass(frozen=True, slots=True)
class Attended:
    """y [B * T, hidden]; index_loss and kept (dense attention on the selection) are scalars."""

    y: Tensor
    index_loss: Tensor
    kept: Tensor


@dataclass(frozen=True, slots=True)
class Keys:
    """What queries look up: keys, values [B, H, T, Dk | Dv], pooled indexer keys [B, P, Di]."""

    keys: Tensor
    values: Tensor
    pooled: Tensor


class _TwoSoftmax(torch.autograd.Function):
    """Attention over the selection, with gradient, and over everything before, without."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, keep: Tensor, causal: Tensor
    ) -> tuple[Tensor, Tensor]:
        p = torch.softmax(logits.masked_fill(~keep[:, None], MASKED), -1)
        full = torch.softmax(logits.masked_fill(~causal, MASKED), -1).sum(1, dtype=torch.float32)
        ctx.save_for_backward(p)
        ctx.mark_non_differentiable(full)
        return p, full

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (p,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return torch._softmax_backward_data(grads[0].contiguous(), p, -1, p.dtype), None, None


def sparse_attention(ctx: Context, prefix: str, x: Tensor, rows: Rows) -> Attended:
    """x [B * T, hidden], T a multiple of the pool; `prefix` ends in "self_attn."."""
    return attend(ctx, prefix, x, rows, (look_up_keys(ctx, prefix, x, rows),))


def look_up_keys(ctx: Context, prefix: str, x: Tensor, rows: Rows) -> Keys:
    """Keys, values and pooled indexer keys of every token."""
    text = ctx.text
    latent = ctx.norm(ctx.linear(x, f"{prefix}kv_a_proj_with_mqa"), f"{prefix}kv_a_layernorm")
    both = _by_head(ctx.linear(latent, f"{prefix}kv_b_proj"), rows, text.num_attention_heads)
    keys, values = both[..., : text.qk_head_dim], both[..., text.qk_head_dim :]
    return Keys(keys, values, _pooled(ctx, f"{prefix}indexer.", x.detach(), rows))


def attend(
    ctx: Context, prefix: str, x: Tensor, rows: Rows, looked_up: tuple[Keys, ...]
) -> Attended:
    """Queries of x against `looked_up`: the first is for every token but the last few.

    Further ones are newest first: looked_up[1] replaces a query's own token, looked_up[2] the one
    before it, as in a chain of drafts, where those tokens came from drafts and the older ones did
    not. A pool that holds drafted tokens is scored by its first version.
    """
    text, H = ctx.text, ctx.text.num_attention_heads
    latent = ctx.norm(ctx.linear(x, f"{prefix}q_a_proj"), f"{prefix}q_a_layernorm")
    q = _by_head(ctx.linear(latent, f"{prefix}q_b_proj"), rows, H) * text.qk_head_dim**-0.5
    base, newer = looked_up[0], looked_up[1:]
    scores = _scores(ctx, f"{prefix}indexer.", (x.detach(), latent.detach()), base.pooled, rows)
    place = rows.places()
    causal = place <= place[:, None]
    with torch.no_grad():
        keep, complete = select(scores, place, text.index_kpool, text.index_topk)
        keep = (keep | (rows.dense > 0)) & causal
    logits = q @ base.keys.mT
    for back, own in enumerate(newer):
        match = (q[:, :, back:] * _until(own.keys, back)).sum(-1)
        logits = torch.diagonal_scatter(logits, match, -back, -2, -1)
    p, full = _TwoSoftmax.apply(logits, keep, causal)  # type: ignore[no-untyped-call]
    out = p @ base.values
    for back, own in enumerate(newer):
        share = p.diagonal(-back, -2, -1).unsqueeze(-1)
        change = share * (_until(own.values, back) - _until(base.values, back))
        out = out + functional.pad(change, (0, 0, back, 0))
    y = ctx.linear(out.transpose(1, 2).flatten(2).flatten(0, 1), f"{prefix}o_proj")
    with torch.no_grad():
        target = full.view(*scores.shape, text.index_kpool).sum(-1)
        kept = _mean((full * keep).sum(-1).flatten() / H, rows.valid)
    valid = rows.valid.view(rows.num_rows, rows.length)
    return Attended(y, index_loss(scores, complete, target, valid), kept)


def _until(t: Tensor, back: int) -> Tensor:
    """[B, H, T - back, D]: what stands `back` tokens before each of the last T - back."""
    return t[:, :, : t.shape[2] - back]


def _by_head(x: Tensor, rows: Rows, heads: int) -> Tensor:
    return x.view(rows.num_rows, rows.length, heads, -1).transpose(1, 2)


def _mean(x: Tensor, weights: Tensor) -> Tensor:
    return (x * weights).sum() / (weights.sum() + 1e-6)


def _pooled(ctx: Context, prefix: str, x: Tensor, rows: Rows) -> Tensor:
    params, D, pool = ctx.params, ctx.text.index_head_dim, ctx.text.index_kpool
    keys = functional.layer_norm(
        ctx.linear(x, f"{prefix}wk").float(),
        (D,),
        params[f"{prefix}k_norm.weight"],
        params[f"{prefix}k_norm.bias"],
        INDEX_NORM_EPS,
    )
    gates = functional.linear(x, params[f"{prefix}index_kpool_compress_gate"].to(x.dtype))
    ape = params[f"{prefix}index_kpool_compress_ape"]
    pooled = ctx.fused.pool_keys(keys.view(-1, pool, D), gates.view(-1, pool, D), ape)
    return pooled.view(rows.num_rows, -1, D)


def _scores(
    ctx: Context, prefix: str, inputs: tuple[Tensor, Tensor], pooled: Tensor, rows: Rows
) -> Tensor:
    """Scores [B, T, P] float32 of inputs = (x [B * T, hidden], query latent [B * T, R])."""
    x, latent = inputs
    D, heads = ctx.text.index_head_dim, ctx.text.index_n_heads
    q = ctx.linear(latent, f"{prefix}wq_b").view(rows.num_rows, -1, D)
    match = (q @ pooled.mT).view(-1, heads, pooled.shape[1])
    weights = ctx.linear(x, f"{prefix}weights_proj").float() * heads**-0.5
    scores = ctx.fused.score_heads(match, weights, D**-0.5)
    return scores.view(rows.num_rows, rows.length, -1)


def select(scores: Tensor, place: Tensor, pool: int, topk: int) -> tuple[Tensor, Tensor]:
    """scores [B, T, P], place [T] -> tokens selected [B, T, T], pools complete [T, P]; bool."""
    P = scores.shape[-1]
    complete = torch.arange(pool - 1, P * pool, pool, device=scores.device) <= place[:, None]
    best = scores.masked_fill(~complete, float("-inf")).topk(min(topk // pool, P), -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & complete
    tail = place >= ((place + 1) // pool * pool)[:, None]
    return chosen.repeat_interleave(pool, -1) | tail, complete


def index_loss(scores: Tensor, complete: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Mean KL(target || softmax(scores)) over tokens with at least two complete pools.

    scores, target [B, T, P], target attention on each pool and of any sum; valid [B, T].
    """
    candidate = complete & (complete.sum(-1, keepdim=True) > 1)
    share = target * candidate
    share = share / (share.sum(-1, keepdim=True) + 1e-9)
    log_q = torch.log_softmax(scores.masked_fill(~candidate, -1e4), -1)
    kl = (share * (torch.log(share + 1e-9) - log_q)).sum(-1)
    return _mean(kl, candidate.any(-1) * valid)
