"""Activations as the kernels of EXL3 weights read them: scaled, rotated, in float16, swizzled.

y = W x with W = svh H Q H suh (formats/exl3.py): `rotate` makes H (suh x) once, for whoever
multiplies it with Q. This is the plain form of what kernels do at the end of the op before.
"""

import torch
from torch import Tensor

from emberbox.formats import exl3

HALF_MAX = 65504.0
TILE = 16
# Inputs 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a tile are neighbours: store_swizzled in gemv.cuh.
ORDER = tuple(i for t in range(4) for i in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9))


def rotate(x: Tensor, suh: Tensor) -> Tensor:
    """x [..., I], suh [I] of whole Hadamard blocks -> float16 [..., I], swizzled."""
    wide = torch.promote_types(x.dtype, torch.float32)
    turned = exl3.rotate(x.to(wide) * suh.to(wide))
    clamped = turned.clamp(-HALF_MAX, HALF_MAX).half()
    return _in_tiles(clamped, list(ORDER))


def unrotate(rotated: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `rotate` was given, times suh: the swizzle and the transform taken back."""
    places = torch.tensor(ORDER, device=rotated.device).argsort()
    return exl3.rotate(_in_tiles(rotated, places).to(dtype))


def _in_tiles(x: Tensor, order: Tensor | list[int]) -> Tensor:
    """The numbers of every tile in another order."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // TILE, TILE)[..., order].flatten(-2)
