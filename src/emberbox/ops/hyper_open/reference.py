"""Close the sublayer before and open the next one, composed of the plain ops."""

import torch
from torch import Tensor

from emberbox.ops.hyper_mix.reference import hyper_mix
from emberbox.ops.hyper_update.reference import hyper_update
from emberbox.ops.rms_norm.reference import rms_norm
from emberbox.ops.rotation import rotate


def hyper_open(  # noqa: PLR0913  four ops in one
    streams: Tensor,
    ys: tuple[Tensor, ...],
    post: Tensor,
    mix: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    suhs: tuple[Tensor, ...],
    eps: tuple[float, float],
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if ys:
        streams.copy_(hyper_update(streams, summed(ys), post, mix))
    collapsed, post, mix = hyper_mix(streams, fn, base, scale, eps, iterations)
    x = rms_norm(collapsed, norm, eps[0])
    return x, rotated_by(x, suhs), post, mix


def summed(ys: tuple[Tensor, ...]) -> Tensor:
    """Their sum, rounded once."""
    wide = torch.promote_types(ys[0].dtype, torch.float32)
    return sum((y.to(wide) for y in ys[1:]), ys[0].to(wide)).to(ys[0].dtype)


def rotated_by(x: Tensor, suhs: tuple[Tensor, ...]) -> Tensor:
    """x [T, H] -> float16 [len(suhs), T, H]."""
    if not suhs:
        return x.new_empty(0, *x.shape, dtype=torch.float16)
    return torch.stack([rotate(x, suh) for suh in suhs])
