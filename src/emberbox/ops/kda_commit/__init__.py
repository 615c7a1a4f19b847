"""Apply accepted tokens to a KDA state: S_t = diag(exp g_t) S_{t-1} + k_t (x) delta_t.

Architecture.md 3.2. k, gate [n, H, Dk], deltas [n, H, Dv] from kda_verify, state [H, Dk, Dv], all
float32 or wider; n may be 0. Returns the new state; `state` is not changed.
"""

import torch

from emberbox.ops import kda_chunk
from emberbox.ops.contract import Op
from emberbox.ops.kda_commit.reference import kda_commit
from emberbox.ops.kda_verify.reference import kda_verify


def make_inputs(T: int, H: int, D: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    x = kda_chunk.make_inputs(T, H, D, dtype=dtype, seed=seed)
    _, deltas = kda_verify(**x)  # type: ignore[arg-type]  # inputs are keyed by name
    return {"k": x["k"], "deltas": deltas, "gate": x["gate"], "state": x["state"]}


OP = Op(
    name="kda_commit",
    reference=kda_commit,
    make_inputs=make_inputs,
    cases=({"T": 1, "H": 1, "D": 8}, {"T": 8, "H": 3, "D": 32}),
    tolerance={torch.float32: 2e-6},
)
