"""A sequence goes on from a snapshot exactly as if it had been computed from its first token."""

import pytest
import torch

from emberbox.errors import OpError
from emberbox.model.batch import Batch, SequenceRows
from emberbox.model.cache import PAGE_TOKENS, CacheSize
from emberbox.model.snapshots import SnapshotStore
from tests.helpers.nano import nano_cache, nano_network

CPU = torch.device("cpu")
NAMES = ("state", "conv", "latents", "pooled", "ring_keys", "ring_gates")
POSITIONS = (1, 3, 63, 64, 65, 130)


def token_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, 3500, (count,), generator=generator).tolist()


@torch.inference_mode()
def run(cache, *rows: SequenceRows):
    """Logits of all rows."""
    network = nano_network()
    return network.logits(network.forward(Batch.of(rows, CPU), cache))


def dirty_cache(*, num_pages: int = 12, num_slots: int = 3):
    """Whatever is read without having been written shows as NaN."""
    cache = nano_cache(num_pages=num_pages, num_slots=num_slots)
    for name in NAMES:
        getattr(cache, name).fill_(float("nan"))
    return cache


def partly_filled(pages: tuple[int, ...], position: int) -> int | None:
    return pages[position // PAGE_TOKENS] if position % PAGE_TOKENS else None


def resumed(position: int):
    """A cache in which slot 2 was restored at `position` of a prompt; the prompt; its new pages."""
    cache, prompt, pages = dirty_cache(), token_ids(position, seed=position), (5, 2, 9, 0)
    store = SnapshotStore(cache, 3)
    run(cache, SequenceRows(prompt, 0, 0, pages))
    store.save(1, 0, partly_filled(pages, position))
    # The sequence goes on, ends, and another one takes its slot: the snapshot knows nothing of it.
    run(cache, SequenceRows(token_ids(90, seed=1), position, 0, pages))
    run(cache, SequenceRows(token_ids(70, seed=2), 0, 0, (7, 8)))
    own = (*pages[: position // PAGE_TOKENS], 11, 4, 10)[:4]
    store.restore(1, 2, partly_filled(own, position))
    return cache, prompt, own


def cold(prompt: list[int], pages: tuple[int, ...]):
    cache = dirty_cache()
    run(cache, SequenceRows(prompt, 0, 1, pages))
    return cache


@pytest.mark.parametrize("position", POSITIONS)
def test_a_restored_sequence_gives_the_bits_of_a_cold_one(position):
    cache, prompt, pages = resumed(position)
    expected = cold(prompt, (1, 3, 6, 8))
    at = position
    for count in (5, 1, 61):  # inside a page, one token, into the next page
        new = token_ids(count, seed=40 + count)
        warm = run(cache, SequenceRows(new, at, 2, pages))
        fresh = run(expected, SequenceRows(new, at, 1, (1, 3, 6, 8)))
        assert torch.isfinite(warm).all()
        assert torch.equal(warm, fresh)
        at += count


@pytest.mark.parametrize("position", POSITIONS)
def test_a_restored_sequence_gives_the_logits_of_one_uncut_pass(position):
    cache, prompt, pages = resumed(position)
    new = token_ids(20, seed=3)
    warm = run(cache, SequenceRows(new, position, 2, pages))
    with torch.inference_mode():
        whole = nano_network().full(torch.tensor([prompt + new]))[0, position:]
    # Other cuts, other orders of summation; float32, logits of size 10.
    assert float((warm - whole).abs().max()) < 1e-3


@pytest.mark.parametrize("position", POSITIONS)
def test_tokens_under_verification_after_a_restore(position):
    cache, prompt, pages = resumed(position)
    expected = cold(prompt, (1, 3, 6, 8))
    new, later = token_ids(6, seed=5), token_ids(4, seed=6)
    warm = run(cache, SequenceRows(new, position, 2, pages, num_verify=5))
    fresh = run(expected, SequenceRows(new, position, 1, (1, 3, 6, 8), num_verify=5))
    assert torch.equal(warm, fresh)
    cache.commit({2: 2})
    expected.commit({1: 2})
    warm = run(cache, SequenceRows(later, position + 3, 2, pages))
    fresh = run(expected, SequenceRows(later, position + 3, 1, (1, 3, 6, 8)))
    assert torch.equal(warm, fresh)


def test_a_snapshot_serves_several_sequences_that_do_not_meet():
    cache, prompt = dirty_cache(), token_ids(70, seed=7)
    store = SnapshotStore(cache, 1)
    run(cache, SequenceRows(prompt, 0, 0, (0, 1)))
    store.save(0, 0, 1)
    store.restore(0, 1, 2)
    store.restore(0, 2, 3)
    a, b = token_ids(6, seed=8), token_ids(9, seed=9)
    expected = dirty_cache()
    run(expected, SequenceRows(prompt, 0, 1, (4, 5)))
    run(expected, SequenceRows(prompt, 0, 2, (6, 7)))
    warm = run(cache, SequenceRows(a, 70, 1, (0, 2)), SequenceRows(b, 70, 2, (0, 3)))
    fresh = run(expected, SequenceRows(a, 70, 1, (4, 5)), SequenceRows(b, 70, 2, (6, 7)))
    assert torch.isfinite(warm).all()
    assert torch.equal(warm, fresh)


def test_save_and_restore_touch_one_slot_and_one_page():
    cache = nano_cache(num_pages=4, num_slots=3)
    generator = torch.Generator().manual_seed(1)
    for name in NAMES:
        getattr(cache, name).normal_(generator=generator)
    before = {name: getattr(cache, name).clone() for name in NAMES}
    store = SnapshotStore(cache, 2)
    store.save(1, 2, 3)
    store.restore(1, 0, 1)
    for name in NAMES:
        expected = before[name]
        source, target = (3, 1) if name in ("latents", "pooled") else (2, 0)
        expected[:, target] = expected[:, source]
        assert torch.equal(getattr(cache, name), expected), name


def test_a_later_save_replaces_the_earlier_one():
    cache = nano_cache(num_pages=2, num_slots=2)
    store = SnapshotStore(cache, 1)
    cache.state.fill_(3)
    store.save(0, 0, 1)
    cache.state.fill_(4)
    store.save(0, 0, None)
    cache.state.fill_(5)
    store.restore(0, 1, None)
    assert cache.state[:, 0].unique().tolist() == [5]
    assert cache.state[:, 1].unique().tolist() == [4]


def test_the_store_says_how_much_it_took_and_takes_no_more():
    cache = nano_cache(num_pages=4, num_slots=2)
    store = SnapshotStore(cache, 5)
    # 6 KDA layers: state 2 x 128 x 128, 3 convolution inputs of 3 x 256. 2 sparse layers: a page of
    # 64 latents and 16 pooled keys of 128, a ring of 16 keys and gates of 128. All float32.
    kda, sparse = 6 * (2 * 128 * 128 + 3 * 768), 2 * (64 * 128 + 16 * 128 + 2 * 16 * 128)
    assert store.num_bytes == 5 * 4 * (kda + sparse)
    store.save(4, 1, 3)
    assert store.num_bytes == 5 * 4 * (kda + sparse)
    assert SnapshotStore(cache, 0).num_bytes == 0


def test_the_draft_layers_cache_has_snapshots_too():
    cache = nano_network().new_draft_cache(CacheSize(num_pages=2, num_slots=2))
    store = SnapshotStore(cache, 1)
    cache.latents[:, 0].fill_(2)
    cache.ring_keys[:, 1].fill_(6)
    store.save(0, 1, 0)
    store.restore(0, 0, 1)
    assert (cache.latents == 2).all()
    assert (cache.ring_keys == 6).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 0, 0), "snapshots: 2 of 2"),
        ((-1, 0, 0), "snapshots: -1 of 2"),
        ((0, 3, 0), "slot 3 of 3"),
        ((0, -1, 0), "slot -1 of 3"),
        ((0, 0, 4), "page 4 of 4"),
        ((0, 0, -1), "page -1 of 4"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    store = SnapshotStore(nano_cache(num_pages=4, num_slots=3), 2)
    store.save(0, 0, 0)
    with pytest.raises(OpError, match=message):
        store.save(*arguments)
    with pytest.raises(OpError, match=message):
        store.restore(*arguments)


def test_what_was_not_saved_is_not_restored():
    cache = nano_cache(num_pages=4, num_slots=2)
    store = SnapshotStore(cache, 2)
    with pytest.raises(OpError, match="1 was never saved"):
        store.restore(1, 0, None)
    store.save(0, 0, None)
    with pytest.raises(OpError, match="0 holds no page, page 2"):
        store.restore(0, 1, 2)
    store.save(0, 0, 1)
    with pytest.raises(OpError, match="0 holds one page, page None"):
        store.restore(0, 1, None)
    with pytest.raises(OpError, match="-1 of them"):
        SnapshotStore(cache, -1)


def test_a_slot_with_tokens_under_verification_is_refused_until_its_commit():
    cache = nano_cache(num_pages=4, num_slots=2)
    store = SnapshotStore(cache, 1)
    store.save(0, 1, None)
    run(cache, SequenceRows([300, 301, 302], 0, 0, (0,), num_verify=2))
    for copy in (store.save, store.restore):
        with pytest.raises(OpError, match="slot 0 has tokens under verification"):
            copy(0, 0, None)
    store.save(0, 1, None)  # another slot waits for nothing
    cache.commit({0: 1})
    store.save(0, 0, 0)
