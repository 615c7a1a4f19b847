"""When a CPU kernel may work on NumPy views: a NumPy call costs half of what a torch call does.

That counts where tensors are tiny, in a decode step of one or a few tokens. NumPy records no
gradients and knows no bfloat16: kernels ask here and leave the rest to their reference.
"""

import torch
from torch import Tensor

# Elements from which torch is as fast as NumPy, or faster because it uses more than one thread.
SMALL = 1 << 15


def is_small(x: Tensor, *others: Tensor) -> bool:
    """Whether all are float32 without gradients, and `x` has few elements."""
    for tensor in (x, *others):
        if tensor.dtype is not torch.float32 or tensor.requires_grad:
            return False
    return x.numel() <= SMALL
