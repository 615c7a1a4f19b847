"""Draw a token from each row of logits, all with the same parameters.

logits [R, V] float32 or bfloat16 (wider on a CPU); uniforms: R numbers in [0, 1); `cuts` and
`changes` as described below, their tensors [V] on the logits' device. Returns int64 [R].

Order: bias, repetition, presence and frequency penalties, ban, temperature, top-k, top-p, min-p,
the inverse CDF over the tokens in falling order of score (float64; of equal scores the lower id
first). Temperature 0: the first of the best scores. Kernels give the token of the reference but
for near-ties: unless a cut by top_p or the draw is within V x 2^-46 of a border between two tokens
(in units of the likeliest token's weight), or the cut by min_p within one rounding of a weight. In
a row with NaN or an infinity any token of the vocabulary is drawn.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.sample_rows.reference import Changes, Cuts, sample_rows

__all__ = ["OP", "Changes", "Cuts", "make_inputs", "sample_rows"]

# top_k, top_p, min_p, of cases in turn.
CUTS = (
    (0, 1.0, 0.0),
    (0, 0.9, 0.0),
    (7, 1.0, 0.0),
    (50, 0.8, 0.02),
    (0, 0.99, 1e-3),
    (1, 0.1, 1.0),
    (0, 0.0, 0.0),
)


def make_inputs(
    R: int, V: int, case: int, penalties: int, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """case: which of CUTS. penalties: whether scores differ from logits."""
    r = Random(seed + case, dtype)
    changes = Changes()
    if penalties:
        changes = Changes(
            bias=r.normal(V, dtype=torch.float64),
            is_seen=r.uniform(V) < 0.3,
            repetition=1.3,
            counts=(4 * r.uniform(V) - 2).clamp(min=0).floor().double(),
            presence=0.3,
            frequency=-0.2,
            is_banned=r.uniform(V) < 0.1 if V > 1 else None,
        )
    return {
        "logits": r.normal(R, V, scale=3.0),
        "uniforms": tuple(r.uniform(R).double().tolist()),
        "cuts": Cuts(0.8, *CUTS[case]),
        "changes": changes,
    }


OP = Op(
    name="sample_rows",
    reference=sample_rows,
    make_inputs=make_inputs,
    cases=(
        {"R": 1, "V": 1, "case": 0, "penalties": 0},
        {"R": 7, "V": 263, "case": 1, "penalties": 1},
        *({"R": 3, "V": 5003, "case": case, "penalties": case % 2} for case in range(len(CUTS))),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    kernels={
        "cuda": Kernel("emberbox.ops.sample_rows.kernel_cuda:sample_rows", "cuda", (8, 0)),
    },
)
