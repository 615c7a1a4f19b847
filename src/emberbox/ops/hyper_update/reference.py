"""Spread a sublayer's result over the streams, in plain torch."""

import torch
from torch import Tensor


def hyper_update(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    wide = torch.promote_types(streams.dtype, torch.float32)
    spread = post.to(wide).unsqueeze(-1) * y.to(wide).unsqueeze(1)
    # mix is (source, destination): the update applies its transpose.
    return (spread + mix.to(wide).transpose(1, 2) @ streams.to(wide)).to(streams.dtype)
