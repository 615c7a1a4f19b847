"""One key per pool of tokens: K_p[c] = sum_i softmax_i(gate_i[c] + ape[i][c]) k_i[c].

Architecture.md 3.4. keys, gates [P, pool, D], ape [pool, D]; returns [P, D] float32 or wider.
"""

import torch

from emberbox.ops.contract import Op
from emberbox.ops.index_pool.reference import index_pool
from emberbox.ops.inputs import Random


def make_inputs(P: int, D: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    return {"keys": r.normal(P, 4, D), "gates": r.normal(P, 4, D), "ape": r.normal(4, D)}


OP = Op(
    name="index_pool",
    reference=index_pool,
    make_inputs=make_inputs,
    cases=({"P": 1, "D": 5}, {"P": 13, "D": 128}),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 2e-6},
)
