"""What makes two prompts the same input: their token ids, and the pictures behind image tokens."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emberbox.chat.media import Patches

_KEY_BITS = 62  # a key and the number of a token inside its picture stay within int64


def prefix_keys(
    token_ids: Sequence[int], images: Sequence["Patches"], image_token_id: int
) -> tuple[int, ...]:
    """Token ids, with a negative number from its picture's digest in place of each image token.

    Without images the token ids as they are. Raises ValueError when there are images and they do
    not make as many tokens as there are.
    """
    if not images:
        return tuple(token_ids)
    if token_ids.count(image_token_id) != sum(patches.num_tokens for patches in images):
        raise ValueError("image tokens and images do not agree")
    of_images = (key for patches in images for key in _picture_keys(patches))
    keys = (next(of_images) if token == image_token_id else token for token in token_ids)
    return tuple(keys)


def _picture_keys(patches: "Patches") -> Sequence[int]:
    digest = blake2b(digest_size=8)
    digest.update(repr((patches.grid, patches.slice_seconds)).encode())
    digest.update(patches.pixel_values.data)
    first = int.from_bytes(digest.digest(), "little") % 2**_KEY_BITS
    return range(-1 - first, -1 - first - patches.num_tokens, -1)
