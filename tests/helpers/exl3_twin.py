"""What kernels of EXL3 weights compute, in plain torch: rotated activations rounded to float16."""

import torch

from emberbox.formats import exl3

SCALE = torch.tensor(128.0**-0.5, dtype=torch.float32)
HALF_MAX = 65504.0


def padded(x, size):
    return torch.nn.functional.pad(x, (0, size - x.shape[-1]))


def rotated(x, suh):
    """x [..., K] -> float64 [..., I], each a float16. Exact where x suh and sums of 128 are."""
    wide = padded(x.double(), len(suh)) * suh.double()
    sums = exl3.rotate(wide) * 128.0**0.5
    return (sums.round(decimals=9).float() * SCALE).clamp(-HALF_MAX, HALF_MAX).half().double()


def product(x, weight, bias=None):
    """y float64 [..., N] of a stored or prepared weight's `exl3.inner` on the CPU."""
    parts = weight.parts
    y = exl3.rotate(rotated(x, parts["suh"]) @ exl3.inner(parts).double()) * parts["svh"].double()
    y = y[..., : weight.shape[0]]
    return y if bias is None else y + bias.double()


def linear_exl3(x, weight, bias=None):
    return product(x, weight, bias).to(x.dtype)


def moe_experts(x, experts, weights, projections, limit):
    """As the op; all experts stored in EXL3."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in experts.unique().tolist():
        rows, places = (experts == expert).nonzero(as_tuple=True)
        gate, up, down = projections[expert]
        g, u = product(x[rows], gate), product(x[rows], up)
        g = g.clamp(max=limit)
        inner = g * g.sigmoid() * u.clamp(-limit, limit)
        out.index_add_(0, rows, product(inner, down) * weights[rows, places].double()[:, None])
    return out.to(x.dtype)
