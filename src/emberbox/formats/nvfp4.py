"""NVFP4: 4-bit floats, an E4M3 scale for each 16 inputs, and one float32 scale for the weight.

Two layouts of the same numbers. ModelOpt multiplies by its global scale, compressed-tensors stores
the reciprocal and divides. Activation scales are read and not used: activations stay wide here.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from emberbox.errors import OpError
from emberbox.formats.base import Format, Part, Shape, ShapePattern

BLOCK = 16
# Magnitude of the low three bits of a code; bit 3 is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX_CODE = MAGNITUDES[-1]
MAX_SCALE = 448.0  # largest finite E4M3 value
MIN_SCALE = 2.0**-6  # smallest normal one
# A code has 2 significant bits and a block's scale 4: with 18 in the global scale a product of the
# three is exact in float32, and encoding a decoded weight gives the same parts back.
SCALE_BITS = 18
MIN_GLOBAL = 2.0**-100


def unpack_codes(packed: Tensor) -> Tensor:
    """uint8 [..., in / 2] -> codes uint8 [..., in]; the low half of a byte is the even input."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def pack_codes(codes: Tensor) -> Tensor:
    """codes uint8 [..., in], each 0 to 15 -> uint8 [..., in / 2]."""
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def code_values(codes: Tensor) -> Tensor:
    """codes uint8 -> float32 values -6 to 6."""
    table = torch.tensor(MAGNITUDES, device=codes.device)
    return torch.cat([table, -table])[codes.int()]


def nearest_codes(values: Tensor) -> Tensor:
    """float -> codes uint8, rounded to nearest, ties to the even code; beyond 6 is 6."""
    table = torch.tensor(MAGNITUDES, device=values.device, dtype=values.dtype)
    middles = (table[1:] + table[:-1]) / 2
    size = values.abs()
    # Of the two searches one puts a tie below, the other above: take the even code of the two.
    below, above = (torch.searchsorted(middles, size, right=right) for right in (False, True))
    codes = torch.where(below % 2 == 0, below, above).to(torch.uint8)
    return codes | ((values < 0).to(torch.uint8) << 3)


def decode_modelopt(parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """float32 [out, in] = code * block scale * global scale."""
    return _per_block(parts) * parts["global"].reshape(())


def decode_compressed(parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """float32 [out, in] = code * block scale / global scale."""
    return _per_block(parts) / parts["global"].reshape(())


def encode_modelopt(weight: Tensor) -> dict[str, Tensor]:
    """[out, in] -> parts, rounded to nearest; the largest weight is 6 * 448 * global scale.

    Encoding a decoded weight gives the same parts while no block is 2^14 times smaller than the
    largest weight. Raises OpError for a weight that is not finite or a width that is no multiple
    of 16.
    """
    values = _checked(weight)
    blocks = _blocks(values)
    amax = blocks.abs().amax(-1)  # [out, in / 16]
    scale = _rounded(amax.max() / (MAX_CODE * MAX_SCALE)).clamp_min(MIN_GLOBAL)
    block_scale = (amax / (MAX_CODE * scale)).clamp(max=MAX_SCALE).to(torch.float8_e4m3fn)
    step = block_scale.float() * scale
    scaled = torch.where(step.unsqueeze(-1) > 0, blocks / step.unsqueeze(-1), 0.0)
    codes = nearest_codes(scaled.flatten(-2))
    return {"codes": pack_codes(codes), "scales": block_scale, "global": scale}


def encode_compressed(weight: Tensor) -> dict[str, Tensor]:
    """The same, the global scale as its reciprocal: decoding rounds where ModelOpt's does not."""
    parts = encode_modelopt(weight)
    return parts | {"global": parts["global"].reciprocal().reshape(1)}


def part_shapes(shape: Shape) -> dict[str, ShapePattern]:
    """codes [out, in / 2], scales [out, in / 16]."""
    rows, width = shape
    return {
        "codes": (rows, width // 2),
        "scales": (rows, width // BLOCK),
        "global": (),
        "input": (),
    }


def _format(
    name: str,
    suffixes: tuple[str, str, str],
    decode: Callable[[Mapping[str, Tensor], Shape], Tensor],
    encode: Callable[[Tensor], dict[str, Tensor]],
) -> Format:
    codes, global_scale, input_scale = suffixes
    wide = (torch.float32,)
    return Format(
        name=name,
        parts={
            "codes": Part(codes, (torch.uint8,)),
            "scales": Part(".weight_scale", (torch.float8_e4m3fn,)),
            "global": Part(global_scale, wide, is_scalar=True),
            "input": Part(input_scale, wide, optional=True, is_scalar=True),
        },
        bits=4.0 + 8.0 / BLOCK,
        multiple=(1, BLOCK),
        part_shapes=part_shapes,
        decode=decode,
        encode=encode,
    )


FORMAT = _format(
    "nvfp4", (".weight", ".weight_scale_2", ".input_scale"), decode_modelopt, encode_modelopt
)
RECIPROCAL = _format(
    "nvfp4_reciprocal",
    (".weight_packed", ".weight_global_scale", ".input_global_scale"),
    decode_compressed,
    encode_compressed,
)


def _per_block(parts: Mapping[str, Tensor]) -> Tensor:
    """float32 [out, in]: code * block scale, exact."""
    values = code_values(unpack_codes(parts["codes"]))
    return (_blocks(values) * parts["scales"].float().unsqueeze(-1)).flatten(-2)


def _blocks(values: Tensor) -> Tensor:
    """[out, in] -> [out, in / 16, 16]."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)


def _checked(weight: Tensor) -> Tensor:
    values = weight.float()
    if not bool(torch.isfinite(values).all()):
        raise OpError("nvfp4: the weight to encode holds a value that is not finite")
    if values.shape[-1] % BLOCK:
        raise OpError(f"nvfp4: width {values.shape[-1]} is not a multiple of {BLOCK}")
    return values


def _rounded(scale: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(scale)
    step = 2.0**SCALE_BITS
    return torch.ldexp(torch.ceil(mantissa * step) / step, exponent)
