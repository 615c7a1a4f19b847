"""Matrix product with a weight in any quantised format: y = x decode(W)^T + b.

x [..., K], weight a QuantTensor of shape [N, K], bias [N] or None; y [..., N] in x's dtype. The
decoded weight is rounded to x's dtype before the product. A format with a kernel of its own gets an
op of its own (`linear_<format>`); this one is what every format can do.
"""

import torch

from emberbox.formats import fp8_block
from emberbox.ops.contract import Op
from emberbox.ops.inputs import Random
from emberbox.ops.linear_quant.reference import linear_quant


def make_inputs(T: int, N: int, K: int, *, dtype: torch.dtype, seed: int = 0) -> dict[str, object]:
    r = Random(seed, dtype)
    weight = fp8_block.FORMAT.quantize(r.normal(N, K, scale=K**-0.5, dtype=torch.float32))
    return {"x": r.normal(T, K), "weight": weight, "bias": r.normal(N)}


OP = Op(
    name="linear_quant",
    reference=linear_quant,
    make_inputs=make_inputs,
    cases=({"T": 1, "N": 128, "K": 128}, {"T": 3, "N": 256, "K": 384}),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 8e-3},
)
