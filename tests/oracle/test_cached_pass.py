"""The cached pass, cut anywhere, against transformers' uncached pass."""

import pytest
import torch

from emberbox.model.batch import Span
from tests.oracle.harness import Rows, Sequences

LENGTH = 71  # past index_topk (32) and past one page (64), ends inside a pool


@pytest.mark.parametrize("cut", range(1, LENGTH))
def test_prefill_cut_at_every_position(oracle, network, cut):
    ids = oracle.token_ids(LENGTH)
    oracle.check(Sequences(network, max_tokens=LENGTH).feed(ids, [cut, LENGTH - cut]), ids)


def test_token_by_token(oracle, any_network):
    ids = oracle.token_ids(139)
    oracle.check(Sequences(any_network).feed(ids, [1] * 139), ids)


@pytest.mark.parametrize("piece", [7, 37, 64])
def test_pieces_of_any_size(oracle, network, piece):
    ids = oracle.token_ids(301, seed=1)
    sizes = [piece] * (300 // piece)
    oracle.check(Sequences(network).feed(ids, [*sizes, 301 - sum(sizes)]), ids)


def test_several_sequences_of_different_length_in_one_batch(oracle, network):
    lengths = {0: 131, 1: 5, 2: 66, 3: 35}
    ids = {slot: oracle.token_ids(length + 12, seed=10 + slot) for slot, length in lengths.items()}
    sequences = Sequences(network, num_slots=4, max_tokens=150)
    parts = {slot: [] for slot in lengths}

    def run(sizes):
        done = dict(sequences.lengths)
        work = {slot: Rows(ids[slot][done[slot] : done[slot] + n]) for slot, n in sizes.items()}
        for slot, logits in sequences.step(work).items():
            parts[slot].append(logits)

    run({2: 66, 0: 50})  # not in order of slots
    run({0: 81, 3: 17, 1: 5})  # one starts, one continues
    run({3: 18})
    for _ in range(4):  # all decode together, one of them by two tokens
        run({3: 1, 1: 2, 0: 1, 2: 1})
    for slot, pieces in parts.items():
        logits = torch.cat(pieces)
        oracle.check(logits, ids[slot][: len(logits)])
        alone = Sequences(network, max_tokens=150)
        alone.feed(ids[slot][: len(logits)], [len(logits)])
        # Choices hide a wrong pool: with few tokens every pool is among the chosen ones.
        for held, expected in zip(rows_of(sequences, slot), rows_of(alone, 0), strict=True):
            assert held.shape == expected.shape
            assert torch.allclose(held, expected, rtol=0, atol=1e-3)  # of values up to 7


def rows_of(sequences, slot):
    """What the next token of a sequence finds: latents, pools, the tokens of an unfinished one."""
    cache, n = sequences.cache, sequences.lengths[slot]
    span = Span(0, 1, n, slot, sequences.pages[slot])
    for layer in range(len(cache.latents)):
        past = cache.read_sparse(layer, span)
        yield from (past.latents, past.pooled, past.keys, past.gates)


def test_a_used_slot_and_used_pages_start_clean(oracle, network):
    sequences = Sequences(network, num_slots=2, max_tokens=128)
    sequences.feed(oracle.token_ids(111, seed=5), [111])
    sequences.restart(0)
    ids = oracle.token_ids(83, seed=6)
    oracle.check(sequences.feed(ids, [2, 41, 1, 39]), ids)
