"""Segment attention through torch's fused attention: no [P, P] matrix is ever stored.

The written-out form needs 16 heads x 32,000^2 float32 logits (66 GB) for the largest image.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from emberbox.ops.contract import require
from emberbox.ops.rms_norm.reference import rms_norm
from emberbox.ops.vision_attention.reference import rotate


def vision_attention(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    angles: Tensor,
    lengths: Sequence[int],
    eps: float,
) -> Tensor:
    P, _, _, D = qkv.shape
    require(
        sum(lengths) == P, "vision_attention: lengths sum to {}, qkv has {} rows", sum(lengths), P
    )
    require(
        tuple(angles.shape) == (P, D // 2),
        "vision_attention: angles {}, expected {}",
        tuple(angles.shape),
        (P, D // 2),
    )
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv.unbind(1)
    # Rounded back to qkv's dtype, so that 16-bit activations take the 16-bit attention kernels.
    q = rotate(rms_norm(q.to(wide), q_weight, eps), angles).to(qkv.dtype)
    k = rotate(rms_norm(k.to(wide), k_weight, eps), angles).to(qkv.dtype)
    outputs, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        qs, ks, vs = (part[rows].transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        outputs.append(scaled_dot_product_attention(qs, ks, vs).squeeze(0).transpose(0, 1))
        start += length
    return torch.cat(outputs)
