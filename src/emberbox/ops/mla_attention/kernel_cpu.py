"""Latent attention absorbed: queries go to the latent space, only selected rows are read.

q~_h = W_K,h^T q_h;  a = softmax(q~_h . c_j Dk^-1/2);  o_h = W_V,h sum_j a_j c_j
(architecture.md 3.3).
"""

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 22  # gathered latents per step: 16 MiB in float32


def mla_attention(q: Tensor, latents: Tensor, kv_b: Tensor, indices: Tensor) -> Tensor:
    T, _, Dk = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    weight, rows = kv_b.to(wide), latents.to(wide)
    scaled = (q.to(wide) * Dk**-0.5).transpose(0, 1)  # [H, T, Dk]
    absorbed = torch.bmm(scaled, weight[:, :Dk]).transpose(0, 1)  # [T, H, C]
    step = max(1, BLOCK_ELEMENTS // (indices.shape[1] * rows.shape[1]))
    outputs = []
    for start in range(0, T, step):
        chosen = indices[start : start + step]
        gathered = rows[chosen.clamp(min=0)]  # [t, K, C]
        logits = absorbed[start : start + step] @ gathered.mT  # [t, H, K]
        logits = logits.masked_fill((chosen < 0).unsqueeze(1), float("-inf"))
        outputs.append(torch.softmax(logits, -1) @ gathered)
    mixed = torch.cat(outputs).transpose(0, 1)  # [H, T, C]
    return torch.bmm(mixed, weight[:, Dk:].mT).transpose(0, 1).to(q.dtype)
