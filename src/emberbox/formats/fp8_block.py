"""Block FP8, the released scheme: E4M3 codes and one F32 scale for each block of 128 x 128 weights.

weight = code * weight_scale_inv of its block (architecture.md 4: a factor, despite its name).
Blocks at the right and lower edge may be partial. Codes 0x7F and 0xFF decode to NaN; every other
code is finite.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from emberbox.errors import OpError
from emberbox.formats.base import Format, Part, Shape, ShapePattern

BLOCK = 128
MAX_CODE = 448.0  # largest finite E4M3 value
# A code has 4 significant bits; with 20 in the scale their product has 24 and is exact in float32,
# so decoding does not round and encoding a decoded weight gives the same parts back.
SCALE_BITS = 20
# Keeps the product exact for the smallest code too: 2^-9 * 2^-120 * 2^-19 > 2^-149.
MIN_SCALE = 2.0**-120


def part_shapes(shape: Shape) -> dict[str, ShapePattern]:
    """weight [out, in], scale [ceil(out / 128), ceil(in / 128)]."""
    return {"weight": shape, "scale": (_num_blocks(shape[0]), _num_blocks(shape[1]))}


def decode(parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """float32 [out, in] = code * scale of the block."""
    return parts["weight"].float() * _per_weight(parts["scale"], shape)


def encode(weight: Tensor) -> dict[str, Tensor]:
    """[out, in] -> codes rounded to nearest even, scale = amax of the block / 448 (to 20 bits).

    Raises OpError for a weight that is not finite.
    """
    values = weight.float()
    if not bool(torch.isfinite(values).all()):
        raise OpError("fp8_block: the weight to encode holds a value that is not finite")
    out_features, in_features = values.shape
    shape = (out_features, in_features)
    scale = _rounded(_block_amax(values) / MAX_CODE).clamp_min(MIN_SCALE)
    # Rounding may leave the scale 2^-20 too small; the quotient still rounds to 448, not beyond.
    codes = (values / _per_weight(scale, shape)).to(torch.float8_e4m3fn)
    return {"weight": codes, "scale": scale}


FORMAT = Format(
    name="fp8_block",
    parts={
        "weight": Part(".weight", (torch.float8_e4m3fn,)),
        "scale": Part(".weight_scale_inv", (torch.float32,)),
    },
    bits=8.0 + 32.0 / BLOCK**2,
    multiple=(1, 1),
    part_shapes=part_shapes,
    decode=decode,
    encode=encode,
)


def _num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def _per_weight(scale: Tensor, shape: Shape) -> Tensor:
    rows = scale.repeat_interleave(BLOCK, dim=0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, dim=1)[:, : shape[1]]


def _block_amax(values: Tensor) -> Tensor:
    """float32 [out, in] -> largest magnitude of each block, [ceil(out / 128), ceil(in / 128)]."""
    rows, columns = _num_blocks(values.shape[0]), _num_blocks(values.shape[1])
    padded = values.new_zeros(rows * BLOCK, columns * BLOCK)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded.view(rows, BLOCK, columns, BLOCK).abs().amax(dim=(1, 3))


def _rounded(scale: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(scale)
    step = 2.0**SCALE_BITS
    return torch.ldexp(torch.round(mantissa * step) / step, exponent)
