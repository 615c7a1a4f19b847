"""A long batch in pieces that attention computes one after another, so that memory stays bounded.

A sequence that is cut goes on from what its first part left in the cache, as it does from one step
to the next. Knows no layers.
"""

from dataclasses import dataclass, replace

from emberbox.model.config import PAGE_TOKENS
from emberbox.model.layers import ROWS
from emberbox.model.steps import Part, Steps


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows start..stop of a batch; `parts` count theirs from 0."""

    start: int
    stop: int
    parts: tuple[Part, ...]

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def in_pieces(parts: tuple[Part, ...], most: int = ROWS) -> tuple[Piece, ...]:
    """All parts in order, in pieces of at most `most` rows.

    A span is cut at the end of a page; steps, and tokens under verification, never.
    """
    pieces: list[Piece] = []
    held: list[Part] = []
    first = 0
    for part in parts:
        rest: Part | None = part
        while rest is not None:
            fitting, rest = _cut(rest, first + most - rest.start, is_alone=not held)
            if fitting is not None:
                held.append(fitting)
            if rest is not None:
                pieces.append(_piece(first, held))
                held, first = [], rest.start
    return (*pieces, _piece(first, held))


def _cut(part: Part, room: int, *, is_alone: bool) -> tuple[Part | None, Part | None]:
    """What of a part goes into a piece with so much room, and what is left."""
    if part.stop - part.start <= room:
        return part, None
    taken = 0
    if not isinstance(part, Steps):
        end = (part.position + min(room, part.num_written)) // PAGE_TOKENS * PAGE_TOKENS
        taken = end - part.position
    if taken > 0 and not isinstance(part, Steps):
        middle = part.start + taken
        head = replace(part, stop=middle, num_verify=0)
        return head, replace(part, start=middle, position=part.position + taken)
    return (part, None) if is_alone else (None, part)


def _piece(first: int, parts: list[Part]) -> Piece:
    own = tuple(replace(p, start=p.start - first, stop=p.stop - first) for p in parts)
    return Piece(first, parts[-1].stop, own)
