"""Batches and caches refuse what does not fit, and verification leaves no trace."""

import pytest
import torch

from emberbox.errors import OpError
from emberbox.model.batch import Batch, SequenceRows, Span
from emberbox.ops.numerics import relative_error
from tests.helpers.nano import nano_cache, nano_network

CPU = torch.device("cpu")


def batch(*rows: SequenceRows) -> Batch:
    return Batch.of(rows, CPU)


def test_batch_lays_sequences_out_one_after_another():
    made = batch(SequenceRows((5, 6), 0, 1, (3,)), SequenceRows((7, 8, 9), 64, 0, (1, 2), 2))
    assert made.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert made.spans == (Span(0, 2, 0, 1, (3,)), Span(2, 5, 64, 0, (1, 2), 2))
    assert made.spans[1].num_written == 1


@pytest.mark.parametrize(
    "spans",
    [
        (Span(0, 2, 0, 0, ()),),  # one token is nobody's
        (Span(0, 2, 0, 0, ()), Span(1, 3, 0, 1, ())),
        (Span(0, 1, 0, 0, ()), Span(1, 1, 0, 1, ()), Span(1, 3, 0, 2, ())),
        (Span(0, 1, 0, 4, ()), Span(1, 3, 0, 4, ())),  # a slot twice
        (Span(0, 3, 0, 0, (), 4),),  # verifies more than it has
    ],
)
def test_batch_refuses_spans_that_do_not_fit(spans):
    with pytest.raises(OpError):
        Batch(torch.tensor([1, 2, 3]), spans)


def test_at_most_eight_tokens_are_verified():
    batch(SequenceRows((1,) * 9, 0, 0, (0,), 8))
    with pytest.raises(OpError, match="verifies 9 of 9"):
        batch(SequenceRows((1,) * 9, 0, 0, (0,), 9))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (SequenceRows((1,), 0, 2, (0,)), "slot 2 of 2"),
        (SequenceRows((1,), 64, 0, (0,)), "needs 65 rows, its pages hold 64"),
        (SequenceRows((1,), 0, 0, (9,)), "page out of"),
    ],
)
def test_cache_refuses_rows_it_has_no_room_for(row, message):
    cache = nano_cache(num_pages=4, num_slots=2)
    with pytest.raises(OpError, match=message):
        cache.begin(batch(row).spans)


def everything(cache):
    return [
        t.clone()
        for t in (
            cache.state,
            cache.conv,
            cache.latents,
            cache.pooled,
            cache.ring_keys,
            cache.ring_gates,
        )
    ]


@torch.inference_mode()
def test_verification_changes_no_bit_until_commit_and_a_rejection_none_after():
    network, cache = nano_network(), nano_cache(num_pages=4, num_slots=2)
    network.forward(batch(SequenceRows((5, 6, 7, 8, 9, 10), 0, 1, (2, 0))), cache)
    before = everything(cache)
    network.forward(batch(SequenceRows((11, 12, 13), 6, 1, (2, 0), 3)), cache)
    for old, new in zip(before, everything(cache), strict=True):
        assert torch.equal(old, new)
    with pytest.raises(OpError, match="commit first"):
        network.forward(batch(SequenceRows((11,), 6, 1, (2, 0))), cache)
    with pytest.raises(OpError, match="cannot accept 4 of 3"):
        cache.commit({1: 4})
    with pytest.raises(OpError, match="slot 0 has no tokens"):
        cache.commit({1: 2, 0: 1})
    cache.commit({1: 0})
    for old, new in zip(before, everything(cache), strict=True):
        assert torch.equal(old, new)
    network.forward(batch(SequenceRows((11, 12, 13), 6, 1, (2, 0), 3)), cache)
    cache.commit({1: 2})
    assert not torch.equal(before[0], cache.state)
    assert torch.equal(before[0][:, 0], cache.state[:, 0]), "another slot changed"


@torch.inference_mode()
def test_a_new_sequence_ignores_what_its_slot_and_pages_held():
    network, cache = nano_network(), nano_cache(num_pages=4, num_slots=2)
    fresh = network.forward(batch(SequenceRows((5, 6, 7, 8, 9), 0, 0, (1,))), cache)
    network.forward(batch(SequenceRows(tuple(range(100, 190)), 0, 0, (1, 2))), cache)
    again = network.forward(batch(SequenceRows((5, 6, 7, 8, 9), 0, 0, (1,))), cache)
    assert torch.equal(fresh, again)


@torch.inference_mode()
def test_discard_forgets_tokens_under_verification():
    network, cache = nano_network(), nano_cache(num_pages=4, num_slots=2)
    network.forward(batch(SequenceRows((5, 6), 0, 0, (1,), 2)), cache)
    cache.discard(0)
    network.forward(batch(SequenceRows((5, 6), 0, 0, (1,), 2)), cache)
    cache.commit({0: 2})


def test_cache_says_how_much_it_took():
    small, large = nano_cache(num_pages=4, num_slots=2), nano_cache(num_pages=8, num_slots=2)
    # two sparse layers: 4 pages x 64 rows x 128 latents and 16 pooled keys of 128, float32
    assert large.num_bytes - small.num_bytes == 2 * 4 * (64 * 128 + 16 * 128) * 4


def test_the_indexer_projects_wide_whatever_the_activation_type():
    indexer = nano_network().layers[3].attention.indexer
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    keys, gates = indexer.keys(x)
    queries, weights = indexer.queries(x, x)
    for found, wanted in (
        (keys, indexer.k_norm(x.double() @ indexer.wk.weight.double().T)),
        (gates, x.double() @ indexer.gate.weight.double().T),
        (queries.flatten(1), x.double() @ indexer.wq_b.weight.double().T),
        (weights, x.double() @ indexer.weights_proj.weight.double().T * 16**-0.5),
    ):
        assert relative_error(found, wanted) < 1e-6
