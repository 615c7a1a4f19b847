"""Apply accepted drafts to the KDA caches of all layers: what kda_decode left pending.

states [L, N, H, D, D] float32 and history [L, N, 3, C], both updated; pending: conv [L, T, C] as
history, k, gate, deltas [L, T, H, D] float32; slots, accepted [B] int32. C = 3 H D, D = 128, T =
B M. Rows b M + 1 .. b M + accepted[b], at most M - 1 of them, are applied to slots[b] in order; a
sequence with accepted[b] = 0 stays as it is. Slots of the others are distinct. Returns nothing.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.kda_apply.reference import kda_apply

D = 128


def make_inputs(
    L: int, B: int, M: int, H: int, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """Sequences accept M - 1, M - 2, .. 0, M - 1, .. drafts."""
    r, T, C, wide = Random(seed, dtype), B * M, 3 * H * D, torch.float32
    return {
        "states": r.normal(L, B + 2, H, D, D, scale=0.3, dtype=wide),
        "history": r.normal(L, B + 2, 3, C),
        "pending": (
            r.normal(L, T, C),
            r.normal(L, T, H, D, scale=D**-0.5, dtype=wide),
            r.uniform(L, T, H, D, low=-5.0, high=-0.01),
            r.normal(L, T, H, D, dtype=wide),
        ),
        "slots": torch.randperm(B + 2, generator=r.generator)[:B].int(),
        "accepted": torch.tensor([M - 1 - b % M for b in range(B)], dtype=torch.int32),
    }


OP = Op(
    name="kda_apply",
    reference=kda_apply,
    make_inputs=make_inputs,
    cases=(
        {"L": 1, "B": 1, "M": 2, "H": 1},
        {"L": 3, "B": 5, "M": 3, "H": 2},
        {"L": 2, "B": 3, "M": 8, "H": 3},
    ),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 2e-6},  # states are float32 either way
    updates=("states", "history"),
    kernels={
        "cuda": Kernel(
            "emberbox.ops.kda_apply.kernel_cuda:kda_apply", "cuda", min_capability=(8, 0)
        )
    },
)
