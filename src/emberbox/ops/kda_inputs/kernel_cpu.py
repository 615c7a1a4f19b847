"""Norms and gates of KDA for a few tokens, on NumPy views."""

import numpy as np
import torch
from torch import Tensor

from emberbox.ops.arrays import is_small
from emberbox.ops.kda_inputs.reference import L2_EPS
from emberbox.ops.kda_inputs.reference import kda_inputs as reference

Array = np.ndarray


def kda_inputs(
    qkv: tuple[Tensor, Tensor], forget: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    if not is_small(*qkv, forget, A_log, dt_bias):
        return reference(qkv, forget, A_log, dt_bias, lower_bound)
    q, k = (x.numpy() for x in qkv)
    half = np.exp(A_log.numpy())[:, None] * 0.5
    gate = np.tanh((forget.numpy() + dt_bias.numpy().reshape(forget.shape[-2:])) * half)
    gate += 1
    gate *= 0.5 * lower_bound
    return (
        torch.from_numpy(_unit(q, q.shape[-1] ** -0.5)),
        torch.from_numpy(_unit(k, 1.0)),
        torch.from_numpy(gate),
    )


def _unit(x: Array, scale: float) -> Array:
    size = np.add.reduce(x * x, axis=-1, keepdims=True)
    size += L2_EPS
    return x * (scale / np.sqrt(size))
