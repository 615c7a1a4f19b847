"""EXL3 tiles in the order in which the kernels read them: a bit-exact repack, and its inverse.

A lane of a warp owns 8 neighbouring positions of each tile (trellis.cuh). Its own bits of 8 tiles
that lie side by side along the outputs follow one another, first bit highest, in n / 8 words; the
words of 32 lanes lie together in loads of 16, then 8, then 4 bytes, so that a warp's loads are
contiguous. Matrices are stored by 128 outputs, then by 16 inputs. Nothing else knows this layout.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from emberbox.errors import OpError
from emberbox.formats import exl3
from emberbox.formats.base import Format, Part, QuantTensor, Shape, ShapePattern, StoredTensor
from emberbox.formats.trellis import RATES, TILE

# I inputs, O outputs, n words of a stored tile, W = n / 8 words of a lane
LANES = 32
TILES = 8  # side by side in one load
NIBBLE = 4
PIECE_BYTES = 32 << 20  # repacked at a time, which takes several times as much


def prepare(trellis: Tensor) -> Tensor:
    """int16 [I/16, O/16, n] as stored -> int32 [O/128, I/16, 32 W].

    Raises OpError where O is not a multiple of 128 or no rate has tiles of n words.
    """
    rows, columns, num_words = trellis.shape
    if num_words not in RATES or columns % TILES:
        raise OpError(
            f"prepare: tiles {list(trellis.shape)}, expected a multiple of {TILES} tiles of "
            f"one of {sorted(RATES)} words"
        )
    groups, size = columns // TILES, LANES * num_words // TILES
    out = torch.empty(groups, rows, size, dtype=torch.int32, device=trellis.device)
    step = max(1, PIECE_BYTES // (4 * rows * size))
    for start in range(0, groups, step):
        piece = trellis[:, start * TILES : (start + step) * TILES]
        nibbles = _nibbles(piece).reshape(rows, -1, TILES, LANES, num_words // 8)
        by_lane = nibbles.permute(1, 0, 3, 2, 4).flatten(-2)  # [O/128, I/16, 32, 8 W]
        out[start : start + step] = _chunked(_words(by_lane))
    return out


def restore(prepared: Tensor) -> Tensor:
    """The inverse of `prepare`."""
    groups, rows, size = prepared.shape
    words = size // LANES
    by_lane = _unchunked(prepared, words).contiguous().view(torch.uint8)
    by_lane = by_lane.reshape(groups, rows, LANES, words, 4).flip(-1).flatten(-2)
    nibbles = _split(by_lane).reshape(groups, rows, LANES, TILES, words)
    tiles = nibbles.permute(1, 0, 3, 2, 4).reshape(rows, groups * TILES, LANES * words)
    return _words(tiles).view(torch.int16)


def part_shapes(shape: Shape) -> dict[str, ShapePattern]:
    """words [O/128, I/16, 32 W], suh [I], svh [O]."""
    outputs, inputs = (-(-size // exl3.BLOCK) * exl3.BLOCK for size in shape)
    return {
        "words": (outputs // exl3.BLOCK, inputs // TILE, None),
        "suh": (inputs,),
        "svh": (outputs,),
        "mul1": (),
        "mcg": (),
    }


def check(parts: Mapping[str, StoredTensor]) -> Iterator[str]:
    """What the shapes of single parts cannot say."""
    size = parts["words"].shape[-1]
    if size % LANES or size // LANES * TILES not in RATES:
        yield f".words: {size} words of 16 x 128 weights, expected {LANES // TILES} n of a rate"
    if all(marker in parts for marker in exl3.MARKERS):
        yield ".mcg: held beside .mul1, a weight has one codebook"


def decode(parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """float32 [out, in], what the stored weight decodes to."""
    return exl3.decode({**parts, "trellis": restore(parts["words"])}, shape)


PREPARED = Format(
    name="exl3_prepared",
    parts={
        "words": Part(".words", (torch.int32,)),
        "suh": Part(".suh", (torch.float16,)),
        "svh": Part(".svh", (torch.float16,)),
        "mul1": Part(".mul1", (torch.int32,), optional=True),
        "mcg": Part(".mcg", (torch.int32,), optional=True),
    },
    bits=None,
    multiple=(1, 1),
    part_shapes=part_shapes,
    decode=decode,
    encode=exl3.encode,
    check=check,
)


def prepared(weight: QuantTensor) -> QuantTensor:
    """An EXL3 weight as kernels read it, on its device; one that is so already as it is."""
    if weight.format is PREPARED:
        return weight
    stored = weight.parts
    parts = {marker: stored[marker] for marker in exl3.MARKERS if marker in stored}
    parts["words"] = prepare(stored["trellis"])
    for new, old in (("suh", "su"), ("svh", "sv")):
        parts[new] = exl3.channels(stored, new, old).half().contiguous()
    return QuantTensor(PREPARED, parts, weight.shape)


def _nibbles(trellis: Tensor) -> Tensor:
    """uint8 [..., 4 n] in ring order: words of 32 bits from the top bit down."""
    in_bytes = trellis.contiguous().view(torch.uint8)
    return _split(in_bytes.reshape(*trellis.shape[:-1], -1, 4).flip(-1).flatten(-2))


def _split(in_bytes: Tensor) -> Tensor:
    return torch.stack([in_bytes >> NIBBLE, in_bytes & 15], -1).flatten(-2)


def _words(nibbles: Tensor) -> Tensor:
    """uint8 [..., 8 w] -> int32 [..., w], the first nibble highest."""
    pairs = nibbles.reshape(*nibbles.shape[:-1], -1, 4, 2)
    in_bytes = pairs[..., 0] << NIBBLE | pairs[..., 1]
    return in_bytes.flip(-1).contiguous().view(torch.int32).squeeze(-1)


def _sizes(words: int) -> list[int]:
    """Words of each load of a lane."""
    return [4] * (words // 4) + [2] * (words % 4 // 2) + [1] * (words % 2)


def _chunked(words: Tensor) -> Tensor:
    """[..., 32, W] -> [..., 32 W]."""
    return torch.cat(
        [part.flatten(-2) for part in torch.split(words, _sizes(words.shape[-1]), -1)], -1
    )


def _unchunked(chunked: Tensor, words: int) -> Tensor:
    sizes = _sizes(words)
    parts = torch.split(chunked, [LANES * size for size in sizes], -1)
    shape = chunked.shape[:-1]
    return torch.cat(
        [part.reshape(*shape, LANES, size) for part, size in zip(parts, sizes, strict=True)], -1
    )
