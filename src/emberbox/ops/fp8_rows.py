"""Rows in float8 e4m3 with one scale for each 128 channels, as a cache of latents may hold them.

Knows no cache: rows in, rows out, in plain torch.
"""

import torch
from torch import Tensor

BLOCK = 128  # channels of one scale
MAX = 448.0  # largest value of e4m3
FP8 = torch.float8_e4m3fn


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, C], C of whole blocks -> float8_e4m3fn [n, C], scales [n, C / 128] float32.

    A block's largest value becomes 448; the scale of a block of zeros is 1.
    """
    blocks = _blocks(x.to(torch.promote_types(x.dtype, torch.float32)))
    largest = blocks.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, largest / MAX).float()
    codes = (blocks / scales.unsqueeze(-1)).to(FP8)
    return codes.flatten(-2), scales


def dequantise_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [n, C] of any float type, scales [n, C / 128] -> [n, C] in the scales' type."""
    blocks = _blocks(codes.to(scales.dtype))
    return (blocks * scales.unsqueeze(-1)).flatten(-2)


def _blocks(x: Tensor) -> Tensor:
    """[n, C] -> [n, C / 128, 128]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
