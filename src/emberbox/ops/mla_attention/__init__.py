"""Multi-head latent attention over selected rows (architecture.md 3.3).

q [T, H, Dk]; latents [N, C], one row per token, key and value of all heads; kv_b [H, Dk+Dv, C] (K
rows first); indices [T, K] int64 rows to attend to, distinct, -1 for none, at least one per query.
Returns [T, H, Dv] in q's dtype; softmax and sums in float32 or wider, scale Dk^-1/2.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.mla_attention.reference import mla_attention


def make_inputs(
    T: int, N: int, K: int, H: int = 3, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    r = Random(seed, dtype)
    order = torch.rand(T, N, generator=r.generator).argsort(-1)[:, :K]
    order[:, 1:][torch.rand(T, K - 1, generator=r.generator) < 0.3] = -1
    return {
        "q": r.normal(T, H, 16, scale=2.0),
        "latents": r.normal(N, 24),
        "kv_b": r.normal(H, 16 + 12, 24, scale=24**-0.5),
        "indices": order,
    }


OP = Op(
    name="mla_attention",
    reference=mla_attention,
    make_inputs=make_inputs,
    cases=({"T": 1, "N": 1, "K": 1}, {"T": 5, "N": 33, "K": 7}, {"T": 67, "N": 131, "K": 19}),
    tolerance={torch.float32: 5e-6, torch.bfloat16: 4e-3},
    kernels={"cpu": Kernel("emberbox.ops.mla_attention.kernel_cpu:mla_attention", "cpu")},
)
