"""Tokens under verification: judged at once, written only when accepted."""

import pytest
import torch

from tests.oracle.harness import Rows, Sequences, restore, same_bits, snapshot

PREFIX = 41  # past index_topk; with 0..3 more tokens every place inside a pool is met
CASES = [(num, accepted) for num in range(1, 9) for accepted in range(num + 1)]


@pytest.mark.parametrize("extra", range(4))
def test_every_accepted_length_leaves_the_right_cache(oracle, network, extra):
    start = PREFIX + extra
    ids = oracle.token_ids(start + 8, seed=20)
    # The draft's tokens up to the last accepted one, then others.
    others = [oracle.token_ids(start + n + 6, seed=77, prefix=ids[: start + n]) for n in range(9)]
    sequences = Sequences(network, max_tokens=128)
    sequences.step({0: Rows(ids[:start])})
    before = snapshot(sequences.cache)
    for num, accepted in CASES:
        restore(sequences.cache, before)
        sequences.lengths[0] = start
        logits = sequences.step({0: Rows(ids[start : start + num], num_verify=num)})[0]
        assert same_bits(sequences.cache, before)
        oracle.check(logits, ids, start)
        sequences.commit({0: accepted})
        after, at = others[accepted], start + accepted
        oracle.check(sequences.feed(after[at:], [5, 1]), after, at)


def test_accepting_nothing_changes_no_bit(oracle, network):
    ids = oracle.token_ids(PREFIX + 8, seed=21)
    sequences = Sequences(network, max_tokens=128)
    sequences.step({0: Rows(ids[:PREFIX])})
    before = snapshot(sequences.cache)
    sequences.step({0: Rows(ids[PREFIX:], num_verify=8)})
    sequences.commit({0: 0})
    assert same_bits(sequences.cache, before)


def test_rounds_of_verification_follow_each_other(oracle, any_network):
    """A drafter that is right by a coin: accepted runs of 0..4, page and pool edges crossed."""
    sequences = Sequences(any_network, max_tokens=192)
    ids = oracle.token_ids(140, seed=22)
    at = 3
    oracle.check(sequences.step({0: Rows(ids[:at])})[0], ids)
    for accepted in torch.randint(0, 5, (40,), generator=torch.Generator().manual_seed(1)).tolist():
        draft = ids[at : at + 4].clone()
        draft[accepted:] = (draft[accepted:] + 1) % 480  # wrong from here on
        logits = sequences.step({0: Rows(draft, num_verify=4)})[0]
        oracle.check(logits[:accepted], ids, at)
        sequences.commit({0: accepted})
        at += accepted
    oracle.check(sequences.step({0: Rows(ids[at:])})[0], ids, at)
    assert at > 64


def test_written_and_verified_tokens_in_one_span_beside_other_sequences(oracle, network):
    ids = {slot: oracle.token_ids(90, seed=30 + slot) for slot in range(3)}
    sequences = Sequences(network, num_slots=3, max_tokens=128)
    sequences.step({0: Rows(ids[0][:62]), 2: Rows(ids[2][:39])})
    logits = sequences.step(
        {
            2: Rows(ids[2][39:45], num_verify=5),
            0: Rows(ids[0][62:70], num_verify=3),
            1: Rows(ids[1][:37], num_verify=8),  # its first pass already holds drafts
        }
    )
    for slot, start in ((0, 62), (1, 0), (2, 39)):
        oracle.check(logits[slot], ids[slot], start)
    sequences.commit({1: 3, 2: 5, 0: 0})
    assert sequences.lengths == {0: 67, 1: 32, 2: 45}
    for slot, at in dict(sequences.lengths).items():
        after = oracle.token_ids(at + 12, seed=78, prefix=ids[slot][:at])
        oracle.check(sequences.feed(after[at:], [7, 5], slot), after, at)


def test_a_discarded_verification_leaves_nothing(oracle, network):
    ids = oracle.token_ids(70, seed=23)
    sequences = Sequences(network, max_tokens=128)
    sequences.step({0: Rows(ids[:50])})
    sequences.step({0: Rows(ids[:6], num_verify=6)})
    sequences.cache.discard(0)
    oracle.check(sequences.step({0: Rows(ids[50:])})[0], ids, 50)
