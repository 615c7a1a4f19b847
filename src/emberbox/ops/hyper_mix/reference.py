"""Coefficients of the hyper-connection and the collapsed stream, in plain torch."""

import torch
from torch import Tensor


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[..., i, j] logits -> nearly doubly stochastic; starts and ends with columns (sums over i).

    2 * iterations - 1 half steps in all (architecture.md 3.1).
    """
    m = torch.softmax(logits, dim=-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


def hyper_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    eps: tuple[float, float],
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    norm_eps, hc_eps = eps
    T, S, _ = streams.shape
    wide = torch.promote_types(streams.dtype, torch.float32)
    x = streams.to(wide)
    flat = x.flatten(1)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    z = flat @ fn.to(wide).T
    b, s = base.to(wide), scale.to(wide)
    pre = torch.sigmoid(z[:, :S] * s[0] + b[:S]) + hc_eps
    post = 2 * torch.sigmoid(z[:, S : 2 * S] * s[1] + b[S : 2 * S])
    mix = sinkhorn((z[:, 2 * S :] * s[2] + b[2 * S :]).view(T, S, S), iterations, hc_eps)
    collapsed = (pre.unsqueeze(-1) * x).sum(1)
    return collapsed.to(streams.dtype), post, mix
