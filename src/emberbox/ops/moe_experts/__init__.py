"""The routed part of a mixture-of-experts layer (architecture.md 3.5).

x [T, H]; experts [T, k] int64, distinct within a row; weights [T, k] float32; projections: for each
expert (gate [I, H], up [I, H], down [H, I]), plain or quantised. Returns
sum_k weights * down(swiglu(gate x, up x, limit)), [T, H] in x's dtype, summed in float32 or wider.
"""

import torch

from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.moe_experts.reference import moe_experts


def make_inputs(T: int, E: int, H: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    I = 2 * H + 1  # noqa: E741  the field's letter for the inner width
    scale = H**-0.5
    return {
        "x": r.normal(T, H, scale=2.0),
        "experts": torch.rand(T, E, generator=r.generator).argsort(-1)[:, :2],
        "weights": r.uniform(T, 2),
        "projections": tuple(
            (r.normal(I, H, scale=scale), r.normal(I, H, scale=scale), r.normal(H, I, scale=scale))
            for _ in range(E)
        ),
        "limit": 1.5,
    }


OP = Op(
    name="moe_experts",
    reference=moe_experts,
    make_inputs=make_inputs,
    cases=({"T": 1, "E": 3, "H": 7}, {"T": 9, "E": 5, "H": 24}, {"T": 300, "E": 5, "H": 7}),
    tolerance={torch.float32: 5e-6, torch.bfloat16: 1e-2},  # two bf16 roundings inside
    kernels={"cpu": Kernel("emberbox.ops.moe_experts.kernel_cpu:moe_experts", "cpu")},
)
