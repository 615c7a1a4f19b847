"""One token each of several sequences at once: the same as one sequence after another."""

import pytest
import torch

from emberbox.model.batch import Batch, SequenceRows, Span
from emberbox.model.steps import Steps, in_parts
from emberbox.ops.numerics import relative_error
from tests.helpers.nano import nano_cache, nano_network

CPU = torch.device("cpu")
LENGTHS = (1, 63, 64, 66, 67, 130)  # about page ends, pool ends and the 64 tokens that are chosen


def test_neighbouring_steps_are_one_part_and_nothing_else_is():
    spans = (
        Span(0, 1, 5, 3, (7,)),
        Span(1, 2, 67, 0, (4, 2)),
        Span(2, 5, 64, 1, (1, 5), 2),  # verifies
        Span(5, 6, 0, 2, (6,)),  # starts a sequence
        Span(6, 7, 8, 4, (3,)),
    )
    first, *middle, last = in_parts(spans, 4, 16, CPU)
    assert middle == [spans[2], spans[3]]
    assert (first.start, first.stop, first.last_position) == (0, 2, 67)
    assert first.slots.tolist() == [3, 0]
    assert first.rows.tolist() == [7 * 64 + 5, 2 * 64 + 3]
    assert first.table.tolist() == [[7, 7], [4, 2]]
    assert first.open_pools.rows.tolist() == [3 * 16 + 5]
    assert first.full_pools.members.tolist() == [1]
    assert first.full_pools.rows.tolist() == [2 * 16]
    assert isinstance(last, Steps)
    assert last.full_pools is None


@torch.inference_mode()
@pytest.mark.parametrize("rows_per_pass", [1, len(LENGTHS)], ids=["alone", "together"])
def test_steps_equal_the_pass_over_the_whole_sequence(rows_per_pass):
    network, cache = nano_network(), nano_cache(num_pages=24, num_slots=len(LENGTHS))
    for tensor in (cache.latents, cache.pooled, cache.ring_keys, cache.ring_gates, cache.conv):
        tensor.fill_(float("nan"))
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(200, (n + 9,), generator=generator) for n in LENGTHS]
    pages = [tuple(range(4 * b + 3, 4 * b - 1, -1)) for b in range(len(LENGTHS))]
    for b, n in enumerate(LENGTHS):
        network.forward(Batch.of([SequenceRows(ids[b][:n].tolist(), 0, b, pages[b])], CPU), cache)
    found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for step in range(9):
        for first in range(0, len(LENGTHS), rows_per_pass):
            members = range(first, first + rows_per_pass)
            rows = [
                SequenceRows([int(ids[b][n])], n, b, pages[b])
                for b, n in ((b, LENGTHS[b] + step) for b in members)
            ]
            for b, hidden in zip(members, network.forward(Batch.of(rows, CPU), cache), strict=True):
                found[b].append(hidden)
    for b, n in enumerate(LENGTHS):
        whole = Batch(ids[b], (Span(0, n + 9, 0, 0, ()),))
        expected = network.forward(whole, None)[n:]
        assert relative_error(torch.stack(found[b]), expected) < 1e-4
