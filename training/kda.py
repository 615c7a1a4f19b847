"""Kimi delta attention in chunks of 32 tokens, under autograd (architecture.md 3.2)."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from training.context import Context, Rows
from training.pointwise import CHUNK

# B rows, T tokens each, H heads, D head width, N = B * n chunks, n chunks per row


class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular A, by two blocks and a short Neumann product.

    In true float32: a TF32 product here is the one place where rounding shows in the loss.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, A: Tensor) -> Tensor:
        allowed = torch.backends.cuda.matmul.allow_tf32 if A.is_cuda else False
        if A.is_cuda:
            torch.backends.cuda.matmul.allow_tf32 = False
        half = A.shape[-1] // 2
        diagonal = torch.stack([A[..., :half, :half], A[..., half:, half:]])
        inverse = torch.eye(half, device=A.device) - diagonal
        power = diagonal @ diagonal
        for _ in range(3):  # I - D, then D^2, D^4, D^8; D^16 is zero
            inverse = inverse + inverse @ power
            power = power @ power
        out = torch.zeros_like(A)
        out[..., :half, :half], out[..., half:, half:] = inverse[0], inverse[1]
        out[..., half:, :half] = -(inverse[1] @ A[..., half:, :half] @ inverse[0])
        if A.is_cuda:
            torch.backends.cuda.matmul.allow_tf32 = allowed
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return -torch.tril(inverse.mT @ grads[0] @ inverse.mT, -1)


def unit_lower_inverse(A: Tensor) -> Tensor:
    """A [..., 32, 32] strictly lower triangular -> (I + A)^-1."""
    result: Tensor = _UnitLowerInverse.apply(A)  # type: ignore[no-untyped-call]
    return result


def kda(ctx: Context, prefix: str, x: Tensor, rows: Rows) -> Tensor:
    """x [B * T, hidden] -> [B * T, hidden], T a multiple of 32; `prefix` ends in "self_attn."."""
    params, text, H = ctx.params, ctx.text, ctx.text.kda_heads
    weight = torch.cat([params[f"{prefix}{name}_proj.weight"] for name in "qkv"])
    conv = torch.cat([params[f"{prefix}{name}_conv1d.weight"] for name in "qkv"]).flatten(1)
    forget = ctx.linear(ctx.linear(x, f"{prefix}f_a_proj"), f"{prefix}f_b_proj")
    q_up, k_up, k_down, v, k_start, q_start, k_end, decay = ctx.fused.kda_inputs(
        torch.nn.functional.linear(x, weight.to(x.dtype)),
        rows.places().repeat(rows.num_rows),
        conv,
        forget,
        (
            params[f"{prefix}dt_bias"],
            params[f"{prefix}A_log"],
            ctx.linear(x, f"{prefix}b_proj"),
        ),
        text.gate_lower_bound,
    )
    inverse = unit_lower_inverse(ctx.fused.below(k_up @ k_down.mT))
    states, news = _scan(
        (inverse @ v, inverse @ k_start, k_end, decay), rows.num_rows, rows.length // CHUNK
    )
    inside = ctx.fused.at_or_below(q_up @ k_down.mT)
    out = q_start @ states + inside @ news
    gate = ctx.linear(ctx.linear(x, f"{prefix}g_a_proj"), f"{prefix}g_b_proj")
    norm = params[f"{prefix}o_norm.weight"]
    mixed = ctx.fused.kda_output(out, gate, norm, text.rms_norm_eps, H)
    return ctx.linear(mixed, f"{prefix}o_proj")


def _scan(operands: tuple[Tensor, ...], num_rows: int, num_chunks: int) -> tuple[Tensor, Tensor]:
    """Chunk after chunk: the state before each, [N, H, D, D], and its values, [N, H, CHUNK, D].

    operands = (values, state weights, keys [N, H, CHUNK, D], decay [N, H, D, 1]).
    """
    H, D = operands[0].shape[1], operands[0].shape[-1]

    def by_chunk(t: Tensor) -> tuple[Tensor, ...]:
        split = t.reshape(num_rows, num_chunks, H, *t.shape[2:])
        return split.transpose(0, 1).flatten(1, 2).unbind(0)  # each [B * H, ...]

    def by_row(parts: list[Tensor]) -> Tensor:
        whole = torch.stack(parts)
        split = whole.view(len(parts), num_rows, H, *whole.shape[2:])
        return split.transpose(0, 1).flatten(0, 1)

    values, weights, keys, decay = (by_chunk(t) for t in operands)
    state = torch.zeros(num_rows * H, D, D, device=operands[0].device)
    states, news = [], []
    for i in range(num_chunks):
        new = torch.baddbmm(values[i], weights[i], state, alpha=-1)
        states.append(state)
        news.append(new)
        state = torch.baddbmm(state * decay[i], keys[i].mT, new)
    return by_row(states), by_row(news)
