"""Close the last sublayer, composed of the plain ops."""

import torch
from torch import Tensor

from emberbox.ops.hyper_open.reference import rotated_by, summed
from emberbox.ops.hyper_update.reference import hyper_update
from emberbox.ops.rms_norm.reference import rms_norm


def hyper_close(  # noqa: PLR0913  three ops in one
    streams: Tensor,
    ys: tuple[Tensor, ...],
    post: Tensor,
    mix: Tensor,
    norm: Tensor,
    suhs: tuple[Tensor, ...],
    eps: float,
) -> tuple[Tensor, Tensor]:
    if ys:
        streams = hyper_update(streams, summed(ys), post, mix)
    wide = torch.promote_types(streams.dtype, torch.float32)
    hidden = rms_norm(streams.to(wide).mean(1).to(streams.dtype), norm, eps)
    return hidden, rotated_by(hidden, suhs)
