"""The gated delta rule, one token after another."""

import torch
from torch import Tensor


def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    v, beta, state = v.to(wide), beta.to(wide), state.to(wide)
    outputs = []
    for t in range(q.shape[0]):
        state = state * gate[t].exp().unsqueeze(-1)  # [H, Dk, Dv]
        seen = torch.einsum("hkv,hk->hv", state, k[t])
        delta = beta[t].unsqueeze(-1) * (v[t] - seen)
        state = state + k[t].unsqueeze(-1) * delta.unsqueeze(-2)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs) if outputs else torch.zeros_like(v), state
