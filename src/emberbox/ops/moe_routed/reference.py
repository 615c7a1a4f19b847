"""Choose experts by logits, then run them, in plain torch."""

from torch import Tensor

from emberbox.formats.base import QuantTensor
from emberbox.ops.moe_experts.reference import moe_experts
from emberbox.ops.route_topk.reference import chosen


def moe_routed(  # noqa: PLR0913  the op's contract
    x: Tensor,
    logits: Tensor,
    bias: Tensor,
    top: int,
    scaling: float,
    projections: tuple[tuple[Tensor | QuantTensor, ...], ...],
    limit: float,
) -> Tensor:
    experts, weights = chosen(logits, bias, top, scaling)
    return moe_experts(x, experts, weights, projections, limit)
