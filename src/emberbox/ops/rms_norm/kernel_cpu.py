"""RMS normalisation of a few rows on NumPy views."""

import numpy as np
import torch
from torch import Tensor

from emberbox.ops.arrays import is_small
from emberbox.ops.rms_norm.reference import rms_norm as reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not is_small(x, weight):
        return reference(x, weight, eps)
    rows = x.numpy()
    mean = np.add.reduce(rows * rows, axis=-1, keepdims=True)
    mean /= rows.shape[-1]
    mean += eps
    return torch.from_numpy(rows / np.sqrt(mean) * weight.numpy())
