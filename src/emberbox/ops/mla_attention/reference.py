"""Latent attention written out: keys and values of every row, a mask, a softmax."""

import torch
from torch import Tensor


def mla_attention(q: Tensor, latents: Tensor, kv_b: Tensor, indices: Tensor) -> Tensor:
    T, _, Dk = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    expanded = torch.einsum("nc,hdc->hnd", latents.to(wide), kv_b.to(wide))
    keys, values = expanded[..., :Dk], expanded[..., Dk:]
    logits = torch.einsum("thd,hnd->thn", q.to(wide), keys) * Dk**-0.5
    allowed = torch.zeros(T, latents.shape[0] + 1, dtype=torch.bool, device=q.device)
    allowed[torch.arange(T, device=q.device).unsqueeze(-1), indices] = (
        True  # -1 marks the spare column
    )
    logits = logits.masked_fill(~allowed[:, :-1].unsqueeze(1), float("-inf"))
    return torch.einsum("thn,hnd->thd", torch.softmax(logits, -1), values).to(q.dtype)
