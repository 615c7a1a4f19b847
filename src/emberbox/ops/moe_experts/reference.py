"""Routed experts in plain torch, one expert after another."""

import torch
from torch import Tensor

from emberbox.formats.base import QuantTensor
from emberbox.ops.swiglu.reference import swiglu


def decoded(weight: Tensor | QuantTensor, dtype: torch.dtype) -> Tensor:
    """The weight as a plain [N, K] tensor of `dtype`."""
    return (weight.decode() if isinstance(weight, QuantTensor) else weight).to(dtype)


def moe_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    projections: tuple[tuple[Tensor | QuantTensor, ...], ...],
    limit: float,
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert in torch.unique(experts).tolist():
        rows, places = (experts == expert).nonzero(as_tuple=True)
        gate, up, down = (decoded(w, x.dtype) for w in projections[expert])
        chosen = x[rows]
        y = swiglu(chosen @ gate.T, chosen @ up.T, limit) @ down.T
        out = out.index_add(0, rows, y.to(wide) * weights[rows, places].to(wide).unsqueeze(-1))
    return out.to(x.dtype)
