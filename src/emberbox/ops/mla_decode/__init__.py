"""Latent attention of a few queries, each over rows of its own of a paged cache, absorbed.

Architecture.md 3.3. q [T, H Dk]; kv_b [H, Dk + Dv, Cl] (K rows first), any float type; latents
[R, Cl] in q's type, or float8_e4m3fn with `scales` float32 [R, Cl / 128] (fp8_rows), else None;
chosen int32 [T, K], distinct flat rows of latents, of which query t attends to the first num[t]
(int32 [T]), whatever stands behind them; a query of none gives zeros. Returns [T, H Dv] in q's
type, or that `rotate`d by suh float16 [H Dv]: float16. Softmax and sums in float32 or wider,
scale Dk^-1/2.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.fp8_rows import quantise_rows
from emberbox.ops.inputs import Random
from emberbox.ops.mla_decode.reference import mla_decode

MAX_QUERIES = 1024  # that a kernel takes at once: 200 MB of working memory, released shapes


def make_inputs(  # noqa: PLR0913  sizes of a case
    T: int,
    K: int,
    H: int = 4,
    Dk: int = 64,
    Dv: int = 64,
    Cl: int = 128,
    has_suh: int = 1,
    fp8: int = 0,
    *,
    dtype: torch.dtype,
    seed: int = 0,
) -> dict[str, object]:
    """Rows among 2 K + 3; num is K for the first query, any from 0 for others, then -1."""
    r = Random(seed, dtype)
    R = 2 * K + 3
    num = r.integers(T, high=K + 1)
    num[0] = K
    chosen = torch.rand(T, R, generator=r.generator).argsort(-1)[:, :K]
    chosen = chosen.masked_fill(torch.arange(K) >= num.unsqueeze(1), -1)
    latents = r.normal(R, Cl)
    codes, scales = quantise_rows(latents) if fp8 else (latents, None)
    return {
        "q": r.normal(T, H * Dk, scale=2.0),
        "kv_b": r.normal(H, Dk + Dv, Cl, scale=Cl**-0.5),
        "latents": codes,
        "scales": scales,
        "chosen": chosen.int(),
        "num": num.int(),
        "suh": r.normal(H * Dv, dtype=torch.float16) if has_suh else None,
    }


OP = Op(
    name="mla_decode",
    reference=mla_decode,
    make_inputs=make_inputs,
    cases=(
        {"T": 1, "K": 1, "H": 2},
        {"T": 3, "K": 33, "has_suh": 0},
        {"T": 5, "K": 131, "H": 18, "Cl": 256},
        {"T": 2, "K": 67, "fp8": 1},
        {"T": 9, "K": 300, "H": 17, "Dk": 24, "Dv": 128, "Cl": 512},
    ),
    tolerance={torch.float32: 3e-4, torch.bfloat16: 6e-3},  # rotated rows are float16
    kernels={
        "cuda": Kernel(
            "emberbox.ops.mla_decode.kernel_cuda:mla_decode",
            "cuda",
            min_capability=(8, 0),
            # Absorbed queries, shares and latents of float8 are rounded to bfloat16.
            tolerance={torch.float32: 3e-4, torch.bfloat16: 1e-2},
        )
    },
)
