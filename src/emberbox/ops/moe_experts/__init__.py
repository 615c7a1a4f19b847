"""The routed part of a mixture-of-experts layer (architecture.md 3.5).

x [T, H]; experts [T, k] int64, distinct within a row; weights [T, k] float32; projections: for each
expert (gate [I, H], up [I, H], down [H, I]), plain or quantised. Returns
sum_k weights * down(swiglu(gate x, up x, limit)), [T, H] in x's dtype, summed in float32 or wider.
A kernel may rotate activations in place of EXL3 weights, and then rounds them to float16.
"""

import torch
from torch import Tensor

from emberbox.formats.base import QuantTensor
from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.linear_exl3 import random_weight
from emberbox.ops.moe_experts.reference import moe_experts

PREFILL_TOKENS = 2048  # that a kernel takes at once: 0.7 GB of working memory, released shapes
TOP_K = 2
INNER = 256  # width of quantised experts
# Words of a tile and codebook of each projection in turn, where experts are quantised.
KINDS = ((32, "mul1"), (32, "mul1"), (48, "mcg"), (40, "mul1"), (32, "mul1"), (32, "mul1"))
# x and the inner activations are rounded to float16 (1.5e-4 each); bf16: two roundings inside.
KERNEL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2}


def make_inputs(
    T: int, E: int, H: int, quantised: int = 0, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """quantised: 1 for experts in EXL3, of H inputs and 256 inside."""
    r = Random(seed, dtype)
    x = r.normal(T, H, scale=2.0)
    chosen = torch.rand(T, E, generator=r.generator).argsort(-1)[:, :TOP_K]
    expert = _quantised if quantised else _plain
    return {
        "x": x,
        "experts": chosen.contiguous(),
        "weights": r.uniform(T, TOP_K),
        "projections": tuple(expert(r, H, e) for e in range(E)),
        "limit": 1.5,
    }


def _plain(r: Random, H: int, expert: int) -> tuple[Tensor, ...]:
    I = 2 * H + 1  # noqa: E741  the field's letter for the inner width
    scale = H**-0.5
    return r.normal(I, H, scale=scale), r.normal(I, H, scale=scale), r.normal(H, I, scale=scale)


def _quantised(r: Random, H: int, expert: int) -> tuple[QuantTensor, ...]:
    """gate, up and down; which rate and codebook each has depends on the expert's number."""
    kinds = [KINDS[(3 * expert + projection) % len(KINDS)] for projection in range(3)]
    shapes = ((INNER, H), (INNER, H), (H, INNER))
    return tuple(random_weight(r, s, *kind) for s, kind in zip(shapes, kinds, strict=True))


OP = Op(
    name="moe_experts",
    reference=moe_experts,
    make_inputs=make_inputs,
    cases=(
        {"T": 1, "E": 3, "H": 7},
        {"T": 9, "E": 5, "H": 24},
        {"T": 300, "E": 5, "H": 7},
        {"T": 1, "E": 3, "H": 128, "quantised": 1},
        {"T": 9, "E": 5, "H": 128, "quantised": 1},
        {"T": 19, "E": 3, "H": 384, "quantised": 1},
    ),
    tolerance={torch.float32: 5e-6, torch.bfloat16: 1e-2},  # two bf16 roundings inside
    kernels={
        "cpu": Kernel("emberbox.ops.moe_experts.kernel_cpu:moe_experts", "cpu"),
        "cuda": Kernel(
            "emberbox.ops.moe_experts.kernel_cuda:moe_experts",
            "cuda",
            min_capability=(8, 0),
            ready="emberbox.ops.moe_experts.bank:ready_bank",
            tolerance=KERNEL_TOLERANCE,
        ),
    },
)
