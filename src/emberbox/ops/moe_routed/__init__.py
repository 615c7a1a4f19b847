"""The routed part of a mixture-of-experts layer, from the logits of its router on.

x [T, H]; logits [T, E] and bias [E] float32. The `top` largest of sigmoid(logits) + bias are
chosen, lower experts first among equals, and weighted as `route_topk` does; then what `moe_experts`
does with `projections` and `limit`. Returns [T, H] in x's dtype.
"""

import torch

from emberbox.ops import moe_experts
from emberbox.ops.contract import Kernel, Op
from emberbox.ops.inputs import Random
from emberbox.ops.moe_routed.reference import moe_routed

SCALING = 2.5


def make_inputs(
    T: int, E: int, H: int, quantised: int = 0, *, dtype: torch.dtype, seed: int = 0
) -> dict[str, object]:
    """quantised: 1 for experts in EXL3, of H inputs and 256 inside."""
    made = moe_experts.make_inputs(T, E, H, quantised, dtype=dtype, seed=seed)
    r = Random(seed + 1, torch.float32)
    return {
        "x": made["x"],
        "logits": r.normal(T, E),
        "bias": 10 + 0.1 * r.normal(E),
        "top": moe_experts.TOP_K,
        "scaling": SCALING,
        "projections": made["projections"],
        "limit": made["limit"],
    }


OP = Op(
    name="moe_routed",
    reference=moe_routed,
    make_inputs=make_inputs,
    cases=(
        {"T": 1, "E": 3, "H": 7},
        {"T": 9, "E": 5, "H": 24},
        {"T": 1, "E": 3, "H": 128, "quantised": 1},
        {"T": 9, "E": 5, "H": 128, "quantised": 1},
        {"T": 19, "E": 3, "H": 384, "quantised": 1},
    ),
    tolerance=moe_experts.OP.tolerance,
    kernels={
        "cuda": Kernel(
            "emberbox.ops.moe_routed.kernel_cuda:moe_routed",
            "cuda",
            min_capability=(8, 0),
            ready="emberbox.ops.moe_experts.bank:ready_bank",
            tolerance=moe_experts.KERNEL_TOLERANCE,
        )
    },
)
