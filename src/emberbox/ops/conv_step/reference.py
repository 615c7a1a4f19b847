"""One token of the causal depthwise convolution per sequence, in plain torch."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def conv_step(x: Tensor, weight: Tensor, history: Tensor, slots: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    window = torch.cat([history[slots].to(x.dtype), x.unsqueeze(1)], dim=1)  # [B, W, C]
    history[slots] = window[:, 1:].to(history.dtype)
    return silu((window.to(wide) * weight.to(wide).T).sum(1)).to(x.dtype)
