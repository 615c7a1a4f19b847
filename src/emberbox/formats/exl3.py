"""EXL3: trellis-coded tiles between two Hadamard rotations, a sign and scale per channel.

    W^T = diag(suh) H Q H diag(svh)          [in, out], H blockwise over 128 channels

Q is decoded from `trellis` (trellis.py) with the codebook that a marker names (codebooks.py); its
rate is the length of the last axis. All of that belongs to one weight, never to a model. Sides are
padded to multiples of 128. Any trellis decodes to finite values.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import Tensor

from emberbox.errors import OpError
from emberbox.formats.base import Format, Part, Shape, ShapePattern, StoredTensor
from emberbox.formats.codebooks import CODEBOOKS, Codebook
from emberbox.formats.trellis import RATES, TILE, decode_tiles, is_half_rate

# I input channels, O output channels, both padded; n words of a tile
BLOCK = 128  # channels of one Hadamard transform
MARKERS = ("mul1", "mcg")  # an int32 scalar; that it is there counts, not its value
FILES_MAY_HOLD = f"{', '.join(str(n) for n in sorted(RATES))}"


def part_shapes(shape: Shape) -> dict[str, ShapePattern]:
    """trellis [I/16, O/16, n], suh [I], svh [O]; in old files su [I/16], sv [O/16]."""
    outputs, inputs = (-(-size // BLOCK) * BLOCK for size in shape)
    return {
        "trellis": (inputs // TILE, outputs // TILE, None),
        "suh": (inputs,),
        "svh": (outputs,),
        "su": (inputs // TILE,),
        "sv": (outputs // TILE,),
        "mul1": (),
        "mcg": (),
        "scale": (),
    }


def check(parts: Mapping[str, StoredTensor]) -> Iterator[str]:
    """What the shapes of single parts cannot say; each sentence starts with a suffix."""
    for new, old in (("suh", "su"), ("svh", "sv")):
        if new not in parts and old not in parts:
            yield f".{new}: missing (part of exl3)"
        if new in parts and old in parts:
            yield f".{old}: stored beside .{new}"
    if all(marker in parts for marker in MARKERS):
        yield ".mcg: stored beside .mul1, a weight has one codebook"
    num_words = parts["trellis"].shape[-1] if parts["trellis"].shape else 0
    if num_words not in RATES:
        yield (
            f".trellis: tiles of {num_words} words, expected {FILES_MAY_HOLD} "
            f"(16 for each bit of a weight)"
        )
    elif is_half_rate(num_words) and "mul1" not in parts:
        yield f".trellis: tiles of {num_words} words, a half rate, without the marker .mul1"


def codebook_of(parts: Mapping[str, object]) -> Codebook:
    """The codebook that the markers among `parts` name; none names 3inst."""
    named = [marker for marker in MARKERS if marker in parts]
    return CODEBOOKS[named[0] if named else "3inst"]


def inner(parts: Mapping[str, Tensor]) -> Tensor:
    """Q, float16 [I, O]: the matrix between the rotations, as a kernel multiplies with it."""
    return _matrix(decode_tiles(parts["trellis"], codebook_of(parts)))


def decode(parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """float32 [out, in], padding cut away."""
    trellis, codebook = parts["trellis"], codebook_of(parts)
    suh, svh = channels(parts, "suh", "su"), channels(parts, "svh", "sv")
    outputs, inputs = svh.shape[0], suh.shape[0]
    weight = torch.zeros(outputs, inputs, device=trellis.device)
    # Block by block of input channels: what is needed besides the result stays small.
    for start in range(0, inputs, BLOCK):
        rows = slice(start, start + BLOCK)
        tiles = trellis[start // TILE : (start + BLOCK) // TILE]
        block = rotate(rotate(_matrix(decode_tiles(tiles, codebook)).float().T).T)
        weight[:, rows] = (suh[rows, None] * block * svh).T
    return weight[: shape[0], : shape[1]].contiguous()


def encode(weight: Tensor) -> dict[str, Tensor]:
    """Refused: a trellis is searched with calibration data."""
    raise OpError("exl3: a weight alone is not enough to encode it", hint="see `emberbox compress`")


def rotate(x: Tensor) -> Tensor:
    """x [..., C] H: the orthonormal Hadamard transform of each 128 channels, its own inverse."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    return torch.matmul(blocks, _hadamard(x.device, x.dtype)).flatten(-2)


FORMAT = Format(
    name="exl3",
    parts={
        "trellis": Part(".trellis", (torch.int16,)),
        "suh": Part(".suh", (torch.float16,), optional=True),
        "svh": Part(".svh", (torch.float16,), optional=True),
        "su": Part(".su", (torch.int16,), optional=True),
        "sv": Part(".sv", (torch.int16,), optional=True),
        "mul1": Part(".mul1", (torch.int32,), optional=True),
        "mcg": Part(".mcg", (torch.int32,), optional=True),
        "scale": Part(".scale", (torch.float32,), optional=True),  # obsolete, not used
    },
    bits=None,
    multiple=(1, 1),
    part_shapes=part_shapes,
    decode=decode,
    encode=encode,
    check=check,
)


def _matrix(tiles: Tensor) -> Tensor:
    """[A, B, 16, 16] -> [16 A, 16 B]."""
    return tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def channels(parts: Mapping[str, Tensor], scales: str, signs: str) -> Tensor:
    """float32 [channels] from float16 scales, or from sign bits: bit b of word w, if set, is -1."""
    if scales in parts:
        return parts[scales].float()
    bits = torch.arange(TILE, device=parts[signs].device)
    return 1.0 - 2.0 * ((parts[signs].int().unsqueeze(-1) >> bits) & 1).flatten().float()


@cache
def _hadamard(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[128, 128] in Sylvester's order, divided by sqrt(128)."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < BLOCK:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h.mul(BLOCK**-0.5).to(device, dtype)
