"""Norms and gates of KDA in plain torch."""

import torch
from torch import Tensor

L2_EPS = 1e-6  # added to the sum of squares; fixed, unrelated to rms_norm_eps


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, in float32 or wider."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return y * torch.rsqrt(y.square().sum(-1, keepdim=True) + L2_EPS)


def kda_inputs(
    qkv: tuple[Tensor, Tensor], forget: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = l2_norm(qkv[0]) * qkv[0].shape[-1] ** -0.5, l2_norm(qkv[1])
    wide = torch.promote_types(forget.dtype, torch.float32)
    raw = forget.to(wide) + dt_bias.to(wide).view(forget.shape[-2:])
    # The bound scales a sigmoid, it does not clamp: zero input and A_log 0 give bound / 2.
    gate = lower_bound * torch.sigmoid(A_log.to(wide).exp().unsqueeze(-1) * raw)
    return q, k, gate
