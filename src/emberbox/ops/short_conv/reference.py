"""Causal depthwise convolution followed by SiLU, in plain torch."""

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import silu


def short_conv(x: Tensor, weight: Tensor, history: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    T, width = x.shape[0], weight.shape[1]
    padded = torch.cat([history.to(x.dtype), x]).to(wide)
    # The last tap multiplies the current token.
    taps = (padded[i : i + T] * weight[:, i].to(wide) for i in range(width))
    return silu(reduce(torch.add, taps)).to(x.dtype)
