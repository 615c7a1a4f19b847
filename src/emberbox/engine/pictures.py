"""The image tokens of one prompt: which embeddings a chunk needs, made when it comes to them.

A picture, or one slice of a clip, is encoded as a whole in the step that first reaches it and
forgotten when the prefill is past it; after a preemption it is encoded again. So a request never
holds more than the pictures of one chunk, and a step encodes no more than those. Knows no network:
`encode` is the runner's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from emberbox.chat.media import Patches

# pixel values [n, D] float32 and grid (1, h, w) -> embeddings [h * w / merge^2, hidden]
Encode = Callable[[NDArray[np.float32], tuple[int, int, int]], Tensor]


@dataclass(frozen=True, slots=True)
class _Slice:
    """A picture or one slice of a clip, and where its tokens stand in the prompt, ascending."""

    places: Sequence[int]
    pixel_values: NDArray[np.float32]
    grid: tuple[int, int, int]

    def meets(self, start: int, stop: int) -> bool:
        return self.places[0] < stop and start <= self.places[-1]


class PromptPictures:
    """Made of a prompt that was checked: it has as many image tokens as its pictures make."""

    def __init__(
        self, token_ids: Sequence[int], images: Sequence[Patches], image_token_id: int
    ) -> None:
        places = [at for at, token in enumerate(token_ids) if token == image_token_id]
        slices = [piece for patches in images for piece in _slices(patches)]
        self._slices: list[_Slice] = []
        for pixel_values, grid, num_tokens in slices:
            self._slices.append(_Slice(places[:num_tokens], pixel_values, grid))
            places = places[num_tokens:]
        assert not places, "the prompt was checked"
        self._made: dict[int, Tensor] = {}  # by number of the slice

    def rows(self, encode: Encode, start: int, stop: int) -> dict[int, Tensor]:
        """Position -> embedding [hidden] of every image token in start..stop."""
        needed = [i for i, each in enumerate(self._slices) if each.meets(start, stop)]
        self._made = {i: self._made[i] for i in needed if i in self._made}
        found: dict[int, Tensor] = {}
        for i in needed:
            each = self._slices[i]
            if i not in self._made:
                self._made[i] = encode(each.pixel_values, each.grid)
            rows = zip(each.places, self._made[i], strict=True)
            found |= {at: row for at, row in rows if start <= at < stop}
        return found

    @property
    def num_made(self) -> int:
        """Embeddings held now."""
        return sum(len(rows) for rows in self._made.values())


def _slices(patches: Patches) -> list[tuple[NDArray[np.float32], tuple[int, int, int], int]]:
    """(pixel values, grid, tokens) of each slice; attention never leaves one."""
    t, h, w = patches.grid
    size, num_tokens = h * w, patches.num_tokens // t
    return [
        (patches.pixel_values[i * size : (i + 1) * size], (1, h, w), num_tokens) for i in range(t)
    ]
