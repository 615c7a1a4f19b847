"""The gated delta rule for tokens that may be rejected: the state is read, never written."""

import torch
from torch import Tensor


def kda_verify(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    v, beta, s = v.to(wide), beta.to(wide), state.to(wide)
    outputs, deltas = [], []
    for t in range(q.shape[0]):
        s = s * gate[t].exp().unsqueeze(-1)
        delta = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
        s = s + k[t].unsqueeze(-1) * delta.unsqueeze(-2)
        outputs.append(torch.einsum("hkv,hk->hv", s, q[t]))
        deltas.append(delta)
    return torch.stack(outputs), torch.stack(deltas)
