"""Coefficients of the hyper-connection for a few tokens: NumPy, and plain floats for the smallest.

Sinkhorn of one 4 x 4 matrix takes 18 us in plain floats, of eight at once 35 us in NumPy (Xeon,
one thread, 2026-11-30); in torch 39 half steps of three calls take 400.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from emberbox.ops.arrays import is_small
from emberbox.ops.hyper_mix.reference import hyper_mix as reference

Array = np.ndarray


def hyper_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    eps: tuple[float, float],
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if not is_small(streams, fn, base, scale):
        return reference(streams, fn, base, scale, eps, iterations)
    norm_eps, hc_eps = eps
    T, S, _ = streams.shape
    flat = streams.flatten(1)
    rows = flat.numpy()
    mean = np.add.reduce(rows * rows, axis=-1, keepdims=True) / rows.shape[1]
    # The norm has no weight: it commutes with the product.
    z = linear(flat, fn).numpy() / np.sqrt(mean + norm_eps)
    z = z * np.repeat(scale.numpy(), (S, S, S * S)) + base.numpy()
    gates = np.tanh(z[:, : 2 * S] * 0.5) + 1  # 2 sigmoid(z)
    pre = gates[:, None, :S] * 0.5 + hc_eps
    collapsed = np.matmul(pre, rows.reshape(T, S, -1))[:, 0]
    if T == 1 and S == 4:
        logits = z[0, 2 * S :].tolist()
        mix = np.array(_sinkhorn_of_four(logits, iterations, hc_eps), np.float32)
    else:
        mix = _sinkhorn(z[:, 2 * S :], S, iterations, hc_eps)
    post = gates[:, S:]
    return (
        torch.from_numpy(collapsed),
        torch.from_numpy(post),
        torch.from_numpy(mix.reshape(T, S, S)),
    )


def _sinkhorn(logits: Array, S: int, iterations: int, eps: float) -> Array:
    """logits [T, S*S] -> [T, S*S]. One product gives each entry its line's sum + eps."""
    of_row, of_column = _line_sums(S, eps)
    cubes = logits.reshape(-1, S, S)
    m = np.exp(cubes - cubes.max(-1, keepdims=True))
    m /= m.sum(-1, keepdims=True)
    # A last column of ones takes part in every product and stays as it is.
    entries = np.ones((len(m), S * S + 1), np.float32)
    entries[:, :-1] = m.reshape(-1, S * S) + eps
    sums = np.empty_like(entries)
    for step in range(2 * iterations - 1):
        np.dot(entries, of_row if step % 2 else of_column, out=sums)
        entries /= sums
    return entries[:, :-1]


@lru_cache
def _line_sums(S: int, eps: float) -> tuple[Array, Array]:
    """Matrices [S*S + 1, S*S + 1]: (entries, 1) -> (sum of each entry's row or column + eps, 1)."""
    one, all_ones = np.eye(S), np.ones((S, S))
    matrices = []
    for lines in (np.kron(one, all_ones), np.kron(all_ones, one)):
        matrix = np.pad(lines, (0, 1))
        matrix[-1] = eps
        matrix[-1, -1] = 1
        matrices.append(matrix.astype(np.float32))
    return matrices[0], matrices[1]


def _sinkhorn_of_four(logits: list[float], iterations: int, eps: float) -> list[float]:
    """The same for one matrix, row by row a..d, e..h, i..l, o..r."""
    m: list[float] = []
    for start in (0, 4, 8, 12):
        row = logits[start : start + 4]
        top = max(row)
        row = [math.exp(x - top) for x in row]
        total = sum(row)
        m += [x / total + eps for x in row]
    a, b, c, d, e, f, g, h, i, j, k, l, o, p, q, r = m  # noqa: E741
    for step in range(iterations):
        if step:  # the rows
            s, t = 1 / (a + b + c + d + eps), 1 / (e + f + g + h + eps)
            u, v = 1 / (i + j + k + l + eps), 1 / (o + p + q + r + eps)
            a, b, c, d, e, f, g, h = a * s, b * s, c * s, d * s, e * t, f * t, g * t, h * t
            i, j, k, l, o, p, q, r = i * u, j * u, k * u, l * u, o * v, p * v, q * v, r * v  # noqa: E741
        s, t = 1 / (a + e + i + o + eps), 1 / (b + f + j + p + eps)
        u, v = 1 / (c + g + k + q + eps), 1 / (d + h + l + r + eps)
        a, e, i, o, b, f, j, p = a * s, e * s, i * s, o * s, b * t, f * t, j * t, p * t
        c, g, k, q, d, h, l, r = c * u, g * u, k * u, q * u, d * v, h * v, l * v, r * v  # noqa: E741
    return [a, b, c, d, e, f, g, h, i, j, k, l, o, p, q, r]
