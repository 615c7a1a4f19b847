"""Name the latent rows that each new token attends to, among paged keys (architecture.md 3.4).

T = B x M rows; row b M + m is token m of sequence b. q float32 [T, Hi * D], weights float32
[T, Hi], pooled [pools of all pages, D]. rows: slots [B] (not read), positions [B] of token 0,
counts [B] of real tokens, table [B, P] of pages, all int32; a page holds 64 tokens. Returns chosen
int32 [T, topk + pool - 1], page * 64 + offset in ascending order of the tokens and -1 beyond num,
and num int32 [T]. Chosen are the topk / pool best complete pools, ties to the lower one, and the
incomplete tail. A row that is no real token chooses nothing, and its pages are not read.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.index_choose.reference import PAGE, index_choose
from emberbox.ops.inputs import Random

POOL, DIM = 4, 128
MAX_SCORES = 1 << 24  # that a kernel holds at a time


def make_inputs(
    B: int, M: int, last: int, Hi: int = 16, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """Sequence b stands at last / (b + 1), and has one real token less than the one before it."""
    r = Random(seed, dtype)
    positions = torch.tensor([last // (b + 1) for b in range(B)], dtype=torch.int32)
    counts = torch.tensor([max(M - b, 0) for b in range(B)], dtype=torch.int32)
    P = (last + M - 1) // PAGE + 1
    pages = torch.randperm(B * P + 2, generator=r.generator)[: B * P].view(B, P).to(torch.int32)
    return {
        "q": r.normal(B * M, Hi * DIM, dtype=torch.float32),
        "weights": r.normal(B * M, Hi, dtype=torch.float32),
        "pooled": r.normal((B * P + 2) * PAGE // POOL, DIM),
        "rows": (torch.arange(B, dtype=torch.int32), positions, counts, pages),
        "pool": POOL,
        "topk": 4 * Hi,
    }


OP = Op(
    name="index_choose",
    reference=index_choose,
    make_inputs=make_inputs,
    cases=(
        {"B": 1, "M": 1, "last": 0},
        {"B": 3, "M": 2, "last": 66},
        {"B": 3, "M": 8, "last": 1003},
        {"B": 1, "M": 37, "last": 700, "Hi": 32},
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    kernels={
        "cuda": Kernel(
            "emberbox.ops.index_choose.kernel_cuda:index_choose", "cuda", min_capability=(8, 0)
        )
    },
)
