"""Segment attention written out in plain torch: norm, rotation, one softmax per segment."""

from collections.abc import Sequence

import torch
from torch import Tensor

from emberbox.ops.rms_norm.reference import rms_norm


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of x [P, H, D] by angles[i] of [P, D/2]."""
    cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def vision_attention(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    angles: Tensor,
    lengths: Sequence[int],
    eps: float,
) -> Tensor:
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv.to(wide).unbind(1)  # [P, H, D] each
    q = rotate(rms_norm(q, q_weight, eps), angles)
    k = rotate(rms_norm(k, k_weight, eps), angles)
    segments = (torch.split(part, list(lengths)) for part in (q, k, v))
    outputs = []
    for qs, ks, vs in zip(*segments, strict=True):
        logits = torch.einsum("qhd,khd->hqk", qs, ks) * q.shape[-1] ** -0.5
        outputs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), vs))
    return torch.cat(outputs).to(qkv.dtype)
