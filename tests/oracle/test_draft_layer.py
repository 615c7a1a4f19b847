"""The MTP layer against a reference made of transformers' modules."""

from itertools import pairwise

import pytest
import torch

from emberbox.errors import OpError
from emberbox.model.batch import Batch, SequenceRows, Span
from emberbox.model.cache import CacheSize
from tests.oracle.checkpoints import MtpReference
from tests.oracle.harness import CPU, difference, margins

LENGTH = 103
PAGES = (1, 0)


@pytest.fixture(scope="module")
def chain(oracle):
    """Tokens x, the trunk's h_t, and the reference's drafts d_t and their logits."""
    reference = MtpReference(oracle.model, oracle.folder)
    with torch.inference_mode():
        for seed in range(50, 70):
            ids = oracle.token_ids(LENGTH + 1, seed=seed)
            hidden = oracle.run(ids).hidden[:LENGTH]
            with margins() as gaps:
                drafts, logits = reference(hidden[None], ids[None, 1:])
            if min(gaps) >= oracle.tolerance / 50:
                return ids, hidden, drafts[0], logits[0]
    raise LookupError("every sequence is close to a tie")


def test_drafts_of_a_whole_sequence_agree(oracle, any_network, chain):
    ids, hidden, drafts, logits = chain
    batch = Batch(ids[:-1], (Span(0, LENGTH, 0, 0, ()),))
    ours = any_network.draft(hidden, ids[1:], batch, None)
    assert difference(ours, drafts) <= oracle.tolerance
    assert difference(any_network.logits(ours), logits) <= oracle.tolerance


def test_drafts_agree_past_the_selection_budget_only_if_the_indexer_chooses(oracle, chain):
    """The reference itself: its own indexer matters, so the tests above test it."""
    ids, hidden, drafts, _ = chain
    reference = MtpReference(oracle.model, oracle.folder)
    reference.self_attn.indexer.index_topk = 1024
    dense, _ = reference(hidden[None], ids[None, 1:])
    assert difference(dense[0], drafts) > 100 * oracle.tolerance


class Drafter:
    """The MTP layer over its own cache, which starts as NaN."""

    def __init__(self, network, chain):
        self.network, (self.ids, self.hidden, _, _) = network, chain
        size = CacheSize(num_pages=len(PAGES), num_slots=1)
        self.cache = network.new_draft_cache(size)
        for tensor in (self.cache.latents, self.cache.pooled, self.cache.ring_keys):
            tensor.fill_(float("nan"))

    def run(self, start, stop, num_verify=0):
        rows = SequenceRows(self.ids[start:stop].tolist(), start, 0, PAGES, num_verify)
        batch = Batch.of([rows], CPU)
        following = self.ids[start + 1 : stop + 1]
        return self.network.draft(self.hidden[start:stop], following, batch, self.cache)


@pytest.mark.parametrize(
    "cuts", [[1, 2, 35, 66, 67], list(range(1, LENGTH))], ids=["cut", "single"]
)
def test_cached_drafts_agree(oracle, network, chain, cuts):
    drafter = Drafter(network, chain)
    ours = torch.cat([drafter.run(a, b) for a, b in pairwise([0, *cuts, LENGTH])])
    assert difference(ours, chain[2]) <= oracle.tolerance


def test_rejected_drafts_leave_nothing_behind(oracle, network, chain):
    drafter, at, parts = Drafter(network, chain), 42, []
    parts.append(drafter.run(0, at))
    for num, accepted in ((4, 0), (8, 3), (5, 5), (3, 1), (7, 7), (8, 2)):
        parts.append(drafter.run(at, at + num, num_verify=num)[:accepted])
        with pytest.raises(OpError, match="commit first"):
            drafter.run(at, at + 1)
        drafter.cache.commit({0: accepted})
        at += accepted
    parts.append(drafter.run(at, LENGTH))
    assert difference(torch.cat(parts), chain[2]) <= oracle.tolerance
