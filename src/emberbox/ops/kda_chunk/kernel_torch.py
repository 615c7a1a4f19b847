"""The gated delta rule in chunks: one triangular solve and a few matrix products per chunk.

With G the running sum of gates inside a chunk that starts from state S0, and u_t the delta written
at t (architecture.md 3.2 unrolled):
  L[t,j] = sum_c k_t k_j e^{G_t - G_j}   (j < t)
  (I + diag(beta) L) U = diag(beta) (V - (K e^G) S0)
  o_t    = (q_t e^{G_t}) S0 + sum_{j<=t} (sum_c q_t k_j e^{G_t - G_j}) u_j
  S      = e^{G_n} S0 + sum_j (k_j e^{G_n - G_j}) u_j
Every exponent is <= 0, so nothing overflows however strong the decay; the solve is exact
substitution in float32, so nearly parallel keys do no harm (architecture.md 10 item 13).
"""

import torch
from torch import Tensor

# 512 tokens, 2 heads of 128, one thread: 28 ms with 16, 51 with 32, 185 with 64 (Xeon, 2026-11-30):
# the decay tensor of CHUNK x CHUNK x D per head decides. A GPU waits for launches, 25 a chunk.
CHUNK, GPU_CHUNK = 16, 64


def chunk_deltas(
    k: Tensor, v: Tensor, total: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Deltas [H, n, Dv] and decay [H, n, n, D] of one chunk.

    k, v, total (running gate sums) [H, n, D], beta [H, n, 1], state [H, Dk, Dv].
    `decay[t, j] = e^{G_t - G_j}` for j <= t, 0 above the diagonal.
    """
    n = k.shape[1]
    lower = torch.ones(n, n, dtype=torch.bool, device=k.device).tril()
    # In place: at full size decay is 134 MB on a GPU.
    decay = total.unsqueeze(2) - total.unsqueeze(1)
    decay.masked_fill_(~lower.unsqueeze(-1), float("-inf")).exp_()
    overlap = torch.einsum("htc,hjc,htjc->htj", k, k, decay).tril(-1)
    system = torch.eye(n, dtype=k.dtype, device=k.device) + beta * overlap
    right = beta * (v - (k * total.exp()) @ state)
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True), decay


def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    v, beta, state = v.to(wide), beta.to(wide), state.to(wide)
    outputs = []
    chunk = GPU_CHUNK if q.is_cuda else CHUNK
    for start in range(0, q.shape[0], chunk):
        part = slice(start, start + chunk)
        # [H, n, D] as they lie, else the products with decay copy it.
        qc, kc, vc, gc = (x[part].transpose(0, 1).contiguous() for x in (q, k, v, gate))
        total = gc.cumsum(1)
        deltas, decay = chunk_deltas(kc, vc, total, beta[part].T.unsqueeze(-1), state)
        attend = torch.einsum("htc,hjc,htjc->htj", qc, kc, decay)
        del decay
        out = (qc * total.exp()) @ state + attend @ deltas
        last = total[:, -1:]
        state = last.exp().transpose(1, 2) * state + (kc * (last - total).exp()).mT @ deltas
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs) if outputs else torch.zeros_like(v), state
