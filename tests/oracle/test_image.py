"""Images in a sequence, end to end: patches to features to logits."""

import pytest
import torch

from tests.oracle import checkpoints
from tests.oracle.harness import Rows, Sequences, difference

GRIDS = ((1, 4, 6), (1, 2, 4))  # 6 and 2 image tokens
LENGTH = 97


@pytest.fixture(scope="module")
def picture(oracle):
    """Token ids with two images in them, patches, and transformers' run of both."""
    ids = oracle.token_ids(LENGTH, seed=40)
    for start, count in ((9, 6), (58, 2)):  # neither begins at a pool's edge
        ids[start : start + count] = checkpoints.IMAGE_TOKEN
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randn(sum(h * w for _, h, w in GRIDS), 1176, generator=generator)
        run = oracle.run(ids, pixel_values=pixels, image_grid_thw=torch.tensor(GRIDS))
        if run.margin >= oracle.tolerance / 50:
            return ids, pixels
    raise LookupError("every picture is close to a tie")


def features_of(network, ids, pixels):
    """(rows of image tokens, their features)."""
    return (ids == checkpoints.IMAGE_TOKEN).nonzero()[:, 0], network.vision.forward(pixels, GRIDS)


def test_features_agree(oracle, any_network, picture):
    ids, pixels = picture
    theirs = oracle.model.get_image_features(pixels, torch.tensor(GRIDS)).pooler_output
    rows, features = features_of(any_network, ids, pixels)
    assert features.shape == (len(rows), checkpoints.TEXT["hidden_size"])
    assert difference(features, torch.cat(list(theirs))) < 1e-5


def test_logits_agree(oracle, any_network, picture):
    ids, pixels = picture
    oracle.check(any_network.full(ids[None], features_of(any_network, ids, pixels))[0], ids)


@pytest.mark.parametrize("size", [1, 11, 59])  # 11 and 59 cut through an image
def test_cached_passes_agree(oracle, network, picture, size):
    ids, pixels = picture
    by_row = dict(zip(*(x.unbind() for x in features_of(network, ids, pixels)), strict=True))
    by_row = {int(row): feature for row, feature in by_row.items()}
    sequences = Sequences(network, max_tokens=128)
    logits = []
    for start in range(0, LENGTH, size):
        here = {row - start: f for row, f in by_row.items() if start <= row < start + size}
        logits.append(sequences.step({0: Rows(ids[start : start + size], features=here)})[0])
    oracle.check(torch.cat(logits), ids)
