"""The codebooks of EXL3: arithmetic that turns a 16-bit trellis window into a weight.

Nothing is stored: a codebook is a multiplier and a rule. Every value is rounded to float16 once,
as the hardware does that multiplies with it. Knows no tiles.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

NUM_WINDOWS = 1 << 16
WORD_MASK = 0xFFFF_FFFF

# Of a product: sign, two exponent bits and the fraction of both halves; flipped into fp16 numbers
# of about 2^-3 to 2^1 in size.
HALVES_MASK = 0x8FFF_8FFF
HALVES_FLIP = 0x3B60_3B60
# fp16 constants of mul1. Not the ideal ones: the mean over all windows is -0.002, not 0.
MUL1_SCALE = 0.00676727294921875  # bits 0x1EEE
MUL1_BIAS = -10.3828125  # bits 0xC931
MUL1_OFFSET = 1024.0  # a byte sum s is the fraction of the fp16 number 1024 + s


def _sum_of_halves(product: Tensor) -> Tensor:
    """int64 [N] of 32-bit products -> float16 [N]: both halves read as float16, added."""
    flipped = (product & HALVES_MASK) ^ HALVES_FLIP
    halves = torch.stack([flipped & 0xFFFF, flipped >> 16]).to(torch.uint16).view(torch.float16)
    return (halves[0].float() + halves[1].float()).half()  # exact in float32, rounded once


def _affine_byte_sum(product: Tensor) -> Tensor:
    """int64 [N] of 32-bit products -> float16 [N]: an affine map of the sum of the four bytes."""
    total = sum(((product >> shift) & 0xFF for shift in (8, 16, 24)), product & 0xFF)
    # Exact in float32 (22 significant bits), so this is the fused multiply-add: rounded once.
    return ((total.float() + MUL1_OFFSET) * MUL1_SCALE + MUL1_BIAS).half()


@dataclass(frozen=True, slots=True)
class Codebook:
    """value = rule((multiplier * window + increment) mod 2^32)."""

    name: str
    multiplier: int
    increment: int
    rule: Callable[[Tensor], Tensor]

    def values(self, device: torch.device | str = "cpu") -> Tensor:
        """float16 [65536]: the value of every window."""
        return _values(self.name, str(device))


CODEBOOKS: Mapping[str, Codebook] = {
    book.name: book
    for book in (
        Codebook("3inst", 89_226_354, 64_248_484, _sum_of_halves),
        Codebook("mcg", 0xCBAC_1FED, 0, _sum_of_halves),
        Codebook("mul1", 0x83DC_D12D, 0, _affine_byte_sum),
    )
}


@cache
def _values(name: str, device: str) -> Tensor:
    book = CODEBOOKS[name]
    windows = torch.arange(NUM_WINDOWS)  # int64: products stay below 2^48
    product = (windows * book.multiplier + book.increment) & WORD_MASK
    return book.rule(product).to(device)
