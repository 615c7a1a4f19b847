"""What a sparse layer does between its first products and its choice of tokens.

Architecture.md 3.3 and 3.4. T = B sequences x M tokens, row r = b M + m. projected [T, Rq + Cl]
(q_a, kv_a); small [T, 2 Di + Hi] float32 (wk, gate, weights). RMS norms q_norm [Rq], kv_norm [Cl];
LayerNorm k_norm ([Di], [Di]); ape [pool, Di]; eps (of RMS norms, of the LayerNorm).
rows (slots [B], positions [B], counts [B], table [B, P]) int32: token m of sequence b stands at
positions[b] + m, in page table[b, position // 64], and is real if m < counts[b].

Of real tokens it writes, in place: latents [R, Cl] (row page * 64 + position % 64) in projected's
type, or in float8_e4m3fn with `scales` [R, Cl / 128] (fp8_rows); ring_keys and ring_gates
[N, 16, Di] float32 (slot, position % 16); pooled [R / pool, Di], where a token completes its pool
of the ring's and these tokens. Returns q_latent [T, Rq] in projected's type, `rotate`d for each
of suhs (float16 [len(suhs), T, Rq]) and the heads' weights [T, Hi] float32, times Hi^-1/2.
"""

import torch
from torch import Tensor

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.fp8_rows import quantise_rows
from emberbox.ops.inputs import Random
from emberbox.ops.mla_open.reference import PAGE_TOKENS, RING, mla_open

POOL = 4


def make_inputs(  # noqa: PLR0913  sizes of a case
    B: int,
    M: int,
    Rq: int = 128,
    Cl: int = 128,
    Hi: int = 3,
    num_suhs: int = 1,
    fp8: int = 0,
    *,
    dtype: torch.dtype,
    seed: int = 0,
) -> dict[str, object]:
    """Sequences of odd lengths; the last of several has fewer real tokens than M."""
    r, Di, pages = Random(seed, dtype), 128, 3
    wide = Random(seed + 1, torch.float32)
    latents = r.normal(B * pages * PAGE_TOKENS, Cl)
    codes, scales = quantise_rows(latents) if fp8 else (latents, None)
    return {
        "projected": r.normal(B * M, Rq + Cl, scale=0.3),
        "small": wide.normal(B * M, 2 * Di + Hi),
        "q_norm": r.normal(Rq),
        "kv_norm": r.normal(Cl),
        "k_norm": (r.normal(Di), r.normal(Di)),
        "ape": r.normal(POOL, Di),
        "latents": codes,
        "scales": scales,
        "pooled": r.normal(len(latents) // POOL, Di),
        "ring_keys": wide.normal(B + 2, RING, Di),
        "ring_gates": wide.normal(B + 2, RING, Di),
        "rows": random_rows(r, B, M, pages),
        "eps": (1e-5, 1e-6),
        "suhs": tuple(r.normal(Rq, dtype=torch.float16) for _ in range(num_suhs)),
    }


def random_rows(r: Random, B: int, M: int, pages: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots of B + 2, positions in the second of `pages` pages each, one sequence not full."""
    order = torch.rand(B + 2, generator=r.generator).argsort()[:B]
    places = torch.rand(B * pages, generator=r.generator).argsort().view(B, pages)
    positions = r.integers(B, high=PAGE_TOKENS) + PAGE_TOKENS - 1
    counts = torch.full((B,), M)
    if B > 1:
        counts[-1] = M // 2
    slots, first, real, table = (part.int() for part in (order, positions, counts, places))
    return slots, first, real, table


OP = Op(
    name="mla_open",
    reference=mla_open,
    make_inputs=make_inputs,
    cases=(
        {"B": 1, "M": 1},
        {"B": 3, "M": 1, "Rq": 384, "num_suhs": 2},
        {"B": 2, "M": 5, "Cl": 256, "Hi": 5, "num_suhs": 0},
        {"B": 1, "M": 37, "Rq": 256, "Cl": 512, "Hi": 32, "num_suhs": 2},
    ),
    tolerance={torch.float32: 3e-4, torch.bfloat16: 6e-3},  # rotated rows are float16
    updates=("latents", "scales", "pooled", "ring_keys", "ring_gates"),
    kernels={"cuda": Kernel("emberbox.ops.mla_open.kernel_cuda:mla_open", "cuda", (8, 0))},
)
