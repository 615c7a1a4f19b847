"""A decode step of fixed shape gives what the network gives, drafts and padding included."""

import pytest
import torch

from emberbox.engine.decode_runner import DecodeRunner, shapes_for
from emberbox.engine.plan import Work
from emberbox.model.batch import Batch, SequenceRows
from emberbox.ops.numerics import relative_error
from tests.helpers.nano import nano_cache, nano_network

CPU = torch.device("cpu")
LENGTHS = (1, 63, 66, 67, 130)
VOCAB = 200


def tokens(num, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (num,), generator=generator).tolist()


class Sequences:
    """LENGTHS sequences, prefilled, against a runner of fixed shapes."""

    def __init__(self, fill=0.0):
        self.network = nano_network()
        self.cache = nano_cache(num_pages=32, num_slots=len(LENGTHS) + 1)
        for tensor in self.cache.of_slots + self.cache.of_pages:
            tensor.fill_(fill)
        self.runner = DecodeRunner(
            self.network, self.cache, max_running=len(LENGTHS), max_model_len=256
        )
        self.ids = [tokens(n, seed) for seed, n in enumerate(LENGTHS)]
        self.pages = [tuple(range(4 * b + 3, 4 * b - 1, -1)) for b in range(len(LENGTHS))]
        for b, ids in enumerate(self.ids):
            rows = [SequenceRows(ids, 0, b, self.pages[b])]
            self.network.forward(Batch.of(rows, CPU), self.cache)

    def work(self, b, new):
        first = len(self.ids[b])
        return Work(b, tuple(new), first, b, self.pages[b], len(new) - 1, samples=True)

    def step(self, new):
        """{sequence: certain token and drafts} -> {sequence: logits}."""
        found = self.runner.run([self.work(b, ids) for b, ids in new.items()])
        return {b: decoded.logits.clone() for b, decoded in found.items()}

    def commit(self, new, accepted):
        held = {b: n for b, n in accepted.items() if len(new[b]) > 1}
        self.cache.commit(held)
        self.runner.commit(held)
        for b, ids in new.items():
            self.ids[b] += ids[: 1 + accepted.get(b, 0)]

    def expected(self, b, new):
        whole = torch.tensor([self.ids[b] + list(new)])
        return self.network.full(whole)[0, -len(new) :]


@pytest.fixture
def sequences():
    with torch.inference_mode():
        yield Sequences(float("nan"))


def test_one_token_each(sequences):
    for step in range(6):
        new = {b: tokens(1, 100 * step + b) for b in range(len(LENGTHS))}
        found = sequences.step(new)
        for b, ids in new.items():
            assert relative_error(found[b], sequences.expected(b, ids)) < 1e-4
        sequences.commit(new, {})


def test_drafts_are_verified_and_only_accepted_ones_are_kept(sequences):
    generator = torch.Generator().manual_seed(7)
    for step in range(5):
        members = torch.randperm(len(LENGTHS), generator=generator)[:4].tolist()
        sizes = torch.randint(1, 9, (4,), generator=generator).tolist()
        new = {b: tokens(n, 100 * step + b) for b, n in zip(members, sizes, strict=True)}
        found = sequences.step(new)
        accepted = {}
        for b, ids in new.items():
            assert relative_error(found[b], sequences.expected(b, ids)) < 1e-4
            accepted[b] = int(torch.randint(len(ids), (1,), generator=generator))
        sequences.commit(new, accepted)


def test_what_fills_a_shape_changes_nothing(sequences):
    """Its numbers are zeros: it would write to slot 0 and page 0, which are no member's here."""
    runner, cache = sequences.runner, sequences.cache
    new = {1: tokens(3, 1), 2: tokens(1, 2), 4: tokens(2, 3)}  # a shape of 4 x 4
    slots = [0, 3, len(LENGTHS)]
    pages = sorted(set(range(32)) - {page for b in new for page in sequences.pages[b]})
    before = [tensor[:, slots].clone() for tensor in cache.of_slots]
    others = [tensor[:, pages].clone() for tensor in cache.of_pages]
    sequences.step(new)
    assert runner._last.num_rows == 16
    assert {0, 12, 15} <= set(pages)
    for tensor, held in zip(cache.of_slots, before, strict=True):
        assert torch.equal(tensor[:, slots].nan_to_num(9), held.nan_to_num(9))
    for tensor, held in zip(cache.of_pages, others, strict=True):
        assert torch.equal(tensor[:, pages].nan_to_num(9), held.nan_to_num(9))


def test_shapes_cover_what_may_run_and_stay_within_32_rows():
    assert [(s.num_sequences, s.num_tokens) for s in shapes_for(1)] == [
        (1, 1),
        (1, 2),
        (1, 4),
        (1, 8),
    ]
    assert len(shapes_for(32)) == 6 + 5 + 4 + 3
    assert max(s.num_rows for s in shapes_for(100)) == 32


def test_drafts_are_limited_so_that_a_step_is_one_shape(sequences):
    runner = sequences.runner
    assert [runner.max_drafts(n) for n in (1, 4, 5, 8, 9, 16, 17, 32, 33)] == [
        7,
        7,
        3,
        3,
        1,
        1,
        0,
        0,
        0,
    ]
