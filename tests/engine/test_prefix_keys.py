"""Keys tell inputs apart: by token, by picture, and by the place inside a picture."""

from dataclasses import replace

import numpy as np
import pytest

from emberbox.chat.media import Patches
from emberbox.engine.prefix_keys import prefix_keys

IMAGE = 9


def patches(seed: int, grid=(1, 4, 6)) -> Patches:
    num = grid[0] * grid[1] * grid[2]
    values = np.random.default_rng(seed).standard_normal((num, 12), dtype=np.float32)
    return Patches(values, grid, merge_size=2)


def test_without_pictures_the_keys_are_the_tokens():
    assert prefix_keys([5, 0, 7], [], IMAGE) == (5, 0, 7)


def test_image_tokens_become_distinct_negative_numbers_of_64_bits():
    one, other = patches(1), patches(2)
    tokens = [5, *[IMAGE] * 6, 6, *[IMAGE] * 6, 7]
    keys = prefix_keys(tokens, [one, other], IMAGE)
    assert [keys[0], keys[7], keys[14]] == [5, 6, 7]
    of_images = keys[1:7] + keys[8:14]
    assert len(set(of_images)) == 12
    assert all(-(2**63) <= key < 0 for key in of_images)


def test_the_same_pixels_give_the_same_keys_and_any_difference_gives_others():
    tokens, one = [5, *[IMAGE] * 6], patches(1)
    keys = prefix_keys(tokens, [one], IMAGE)
    assert prefix_keys(tokens, [patches(1)], IMAGE) == keys
    values = one.pixel_values.copy()
    values[-1, -1] = np.nextafter(values[-1, -1], np.float32(9))
    for other in (
        replace(one, pixel_values=values),
        replace(one, grid=(1, 6, 4)),
        replace(one, grid=(1, 2, 12)),
        replace(one, slice_seconds=(0.5,)),
    ):
        assert not set(prefix_keys(tokens, [other], IMAGE)[1:]) & set(keys[1:])


def test_the_order_of_pictures_counts():
    tokens = [*[IMAGE] * 6, 5, *[IMAGE] * 6]
    one, other = patches(1), patches(2)
    keys, swapped = (prefix_keys(tokens, order, IMAGE) for order in ((one, other), (other, one)))
    assert keys[:6] == swapped[7:]
    assert keys[7:] == swapped[:6]
    assert keys[:6] != swapped[:6]


@pytest.mark.parametrize("num_tokens", [0, 5, 7])
def test_pictures_that_do_not_fit_their_tokens_are_refused(num_tokens):
    with pytest.raises(ValueError, match="do not agree"):
        prefix_keys([5, *[IMAGE] * num_tokens], [patches(1)], IMAGE)


def test_token_zero_is_a_token_like_others():
    keys = prefix_keys([0, *[IMAGE] * 6, 0], [patches(1)], IMAGE)
    assert (keys[0], keys[7]) == (0, 0)


def test_too_many_image_tokens_are_refused_beside_a_token_zero():
    with pytest.raises(ValueError, match="do not agree"):
        prefix_keys([0, *[IMAGE] * 7], [patches(1)], IMAGE)
