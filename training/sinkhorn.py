"""Sinkhorn normalisation with a backward that undoes it step by step (architecture.md 3.1).

Forward divides by row or column sums 2 * iterations - 1 times. Autograd would keep every matrix in
between; here only the sums are kept, and backward walks from the last matrix to the first.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

# T tokens; matrices are [T, source, destination]; even half steps divide by sums over sources.


def forward(logits: Tensor, num_halves: int, eps: float) -> tuple[Tensor, Tensor]:
    """logits [T, S, S] -> nearly doubly stochastic [T, S, S], and the sums [num_halves, T, S]."""
    m = torch.softmax(logits, -1) + eps
    sums = []
    for half in range(num_halves):
        dim = -2 if half % 2 == 0 else -1
        total = m.sum(dim)
        m = m / (total + eps).unsqueeze(dim)
        sums.append(total)
    return m, torch.stack(sums)


def backward(out: Tensor, sums: Tensor, grad: Tensor, eps: float) -> Tensor:
    """The gradient of the logits."""
    for half in reversed(range(sums.shape[0])):
        dim = -2 if half % 2 == 0 else -1
        total = (sums[half] + eps).unsqueeze(dim)
        grad = (grad - (grad * out).sum(dim, keepdim=True)) / total
        out = out * total
    soft = out - eps
    return soft * (grad - (grad * soft).sum(-1, keepdim=True))


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, iterations: int, eps: float) -> Tensor:
        num_halves = 2 * iterations - 1
        if logits.is_cuda:
            from training import kernel_triton

            out, sums = kernel_triton.sinkhorn_forward(logits.contiguous(), num_halves, eps)
        else:
            out, sums = forward(logits, num_halves, eps)
        ctx.save_for_backward(out, sums)
        ctx.eps = eps  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        out, sums = ctx.saved_tensors  # type: ignore[attr-defined]
        eps: float = ctx.eps  # type: ignore[attr-defined]
        if out.is_cuda:
            from training import kernel_triton

            grad = kernel_triton.sinkhorn_backward(out, sums, grads[0].contiguous(), eps)
        else:
            grad = backward(out, sums, grads[0], eps)
        return grad, None, None


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """logits [T, S, S] float32 -> [T, S, S]; begins and ends with sums over sources."""
    result: Tensor = _Sinkhorn.apply(logits, iterations, eps)  # type: ignore[no-untyped-call]
    return result
