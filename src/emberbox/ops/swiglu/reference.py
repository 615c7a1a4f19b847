"""Clamped SwiGLU in plain torch."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    # The gate is clamped from above only, the up projection on both sides.
    return (silu(g.clamp(max=limit)) * u.clamp(-limit, limit)).to(gate.dtype)
