"""How one matrix is to be compressed, and how its tiles are handed to a search.

Knows the tiles of a matrix; knows no scales and no Hessian.
"""

from dataclasses import dataclass

from torch import Tensor

from emberbox.compress.trellis_steps import Search
from emberbox.errors import OpError, SettingsError
from emberbox.formats.codebooks import CODEBOOKS
from emberbox.formats.trellis import RATES, TILE, element_order, is_half_rate, pack

# E matrices of a group, N tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisPlan:
    """bits: 1 to 8, or 1.5, 2.5, 3.5 with mul1. seed: of the random signs."""

    bits: float
    codebook: str = "mul1"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.codebook not in CODEBOOKS:
            raise SettingsError(f"codebook: {self.codebook!r}, expected one of {sorted(CODEBOOKS)}")
        if self.bits * TILE not in RATES:
            rates = ", ".join(f"{words / TILE:g}" for words in sorted(RATES))
            raise SettingsError(f"bits: {self.bits:g}, expected one of {rates}")
        if is_half_rate(self.num_words) and self.codebook != "mul1":
            raise SettingsError(f"bits: {self.bits:g} exists for codebook mul1 only")

    @property
    def num_words(self) -> int:
        """16-bit words of a tile."""
        return int(self.bits * TILE)


@dataclass(frozen=True, slots=True)
class Coder:
    """Rounds what is handed in to what a trellis can hold, on its device and in its dtype."""

    plan: TrellisPlan
    search: Search

    def values(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Tiles [N, 16, 16] -> the nearest values that exist, and windows, int32 [N, 256]."""
        windows = self.search(tiles.float(), self.plan.num_words, self.plan.codebook).windows
        order = element_order(str(tiles.device))
        book = CODEBOOKS[self.plan.codebook].values(tiles.device)
        return book[windows[:, order]].view(tiles.shape).to(tiles.dtype), windows

    def round(self, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """[E, in, out] -> the nearest values, and trellises, int16 [E, in/16, out/16, n].

        One search for all: a tile's path does not depend on its neighbours.
        """
        tiles = to_tiles(matrices)
        values, windows = self.values(tiles.flatten(0, 2))
        trellis = pack(windows, self.plan.num_words)
        return from_tiles(values.view(tiles.shape)), trellis.view(*tiles.shape[:3], -1)


def to_tiles(matrix: Tensor) -> Tensor:
    """[..., 16 A, 16 B] -> [..., A, B, 16, 16]."""
    *lead, rows, columns = matrix.shape
    if rows % TILE or columns % TILE:
        raise OpError(f"trellis: a matrix of {rows} x {columns}, expected multiples of {TILE}")
    blocks = matrix.reshape(*lead, rows // TILE, TILE, columns // TILE, TILE)
    return blocks.transpose(-3, -2)


def from_tiles(tiles: Tensor) -> Tensor:
    """[..., A, B, 16, 16] -> [..., 16 A, 16 B]."""
    return tiles.transpose(-3, -2).flatten(-2, -1).flatten(-3, -2)
