"""Sinkhorn of 4 x 4 matrices and its backward as Triton kernels; see sinkhorn.py for the method."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64


@triton.jit
def _forward(l_ptr, y_ptr, s_ptr, n, EPS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, 4)
    ok = t[:, None, None] < n
    off = t[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
    x = tl.load(l_ptr + off, mask=ok, other=0.0)
    x = tl.exp(x - tl.max(x, axis=2)[:, :, None])
    x = x / tl.sum(x, axis=2)[:, :, None] + EPS
    so = t[:, None] * 4 + i[None, :]
    for h in tl.static_range(HALF):
        if h % 2 == 0:
            s = tl.sum(x, axis=1)
            x = x / (s + EPS)[:, None, :]
        else:
            s = tl.sum(x, axis=2)
            x = x / (s + EPS)[:, :, None]
        tl.store(s_ptr + h * n * 4 + so, s, mask=t[:, None] < n)
    tl.store(y_ptr + off, x, mask=ok)


@triton.jit
def _backward(
    y_ptr, s_ptr, dy_ptr, dl_ptr, n, EPS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, 4)
    ok = t[:, None, None] < n
    off = t[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
    y = tl.load(y_ptr + off, mask=ok, other=0.0)
    d = tl.load(dy_ptr + off, mask=ok, other=0.0)
    so = t[:, None] * 4 + i[None, :]
    for r in tl.static_range(HALF):
        h = HALF - 1 - r
        s = tl.load(s_ptr + h * n * 4 + so, mask=t[:, None] < n, other=1.0) + EPS
        if h % 2 == 0:
            d = (d - tl.sum(d * y, axis=1)[:, None, :]) / s[:, None, :]
            y = y * s[:, None, :]
        else:
            d = (d - tl.sum(d * y, axis=2)[:, :, None]) / s[:, :, None]
            y = y * s[:, :, None]
    p = y - EPS
    d = p * (d - tl.sum(d * p, axis=2)[:, :, None])
    tl.store(dl_ptr + off, d, mask=ok)


def sinkhorn_forward(logits: Tensor, num_halves: int, eps: float) -> tuple[Tensor, Tensor]:
    """logits [T, 4, 4] float32 contiguous -> matrices [T, 4, 4] and sums [num_halves, T, 4]."""
    n = logits.shape[0]
    out = torch.empty_like(logits)
    sums = torch.empty((num_halves, n, 4), dtype=torch.float32, device=logits.device)
    _forward[(triton.cdiv(n, BLOCK),)](logits, out, sums, n, eps, num_halves, BLOCK, num_warps=2)
    return out, sums


def sinkhorn_backward(out: Tensor, sums: Tensor, grad: Tensor, eps: float) -> Tensor:
    """The gradient of the logits from that of the matrices, all [T, 4, 4] contiguous."""
    n, num_halves = out.shape[0], sums.shape[0]
    result = torch.empty_like(out)
    _backward[(triton.cdiv(n, BLOCK),)](
        out, sums, grad, result, n, eps, num_halves, BLOCK, num_warps=2
    )
    return result
