"""One token of the gated delta rule per sequence, in plain torch."""

import torch
from torch import Tensor


def kda_step(
    qkv: tuple[Tensor, Tensor, Tensor], gate: Tensor, beta: Tensor, states: Tensor, slots: Tensor
) -> Tensor:
    q, k, v = qkv
    wide = torch.promote_types(q.dtype, torch.float32)
    state = states[slots].to(wide) * gate.exp().unsqueeze(-1)  # [B, H, Dk, Dv]
    seen = torch.einsum("bhkv,bhk->bhv", state, k)
    delta = beta.to(wide).unsqueeze(-1) * (v.to(wide) - seen)
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    states[slots] = state.to(states.dtype)
    return torch.einsum("bhkv,bhk->bhv", state, q)
