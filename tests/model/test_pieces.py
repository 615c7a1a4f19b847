"""A long batch is computed in pieces: where it is cut, and that no result depends on it."""

import pytest
import torch

from emberbox.model import network as network_module
from emberbox.model.batch import Batch, SequenceRows, Span
from emberbox.model.layers import ROWS, by_rows
from emberbox.model.pieces import Piece, in_pieces
from emberbox.model.steps import Steps, in_parts
from emberbox.ops.numerics import relative_error
from tests.helpers.nano import nano_cache, nano_network

CPU = torch.device("cpu")


def shown(pieces):
    """(start, stop) of pieces, and of their parts: (start, stop, position, num_verify)."""
    return [
        (p.start, p.stop, [(s.start, s.stop, s.position, s.num_verify) for s in p.parts])
        for p in pieces
    ]


def test_a_batch_that_fits_is_one_piece_as_it_is():
    parts = Span(0, 5, 7, 0, (0,)), Span(5, 100, 0, 1, (1, 2), num_verify=3)
    assert in_pieces(parts, 100) == (Piece(0, 100, parts),)
    assert ROWS >= 512 + 64  # the default step is not cut


def test_a_span_is_cut_at_the_ends_of_pages():
    span = Span(0, 300, 70, 4, tuple(range(6)), num_verify=2)
    assert shown(in_pieces((span,), 100)) == [
        (0, 58, [(0, 58, 70, 0)]),
        (58, 122, [(0, 64, 128, 0)]),
        (122, 186, [(0, 64, 192, 0)]),
        (186, 250, [(0, 64, 256, 0)]),
        (250, 300, [(0, 50, 320, 2)]),
    ]
    slots = {part.slot for piece in in_pieces((span,), 100) for part in piece.parts}
    assert slots == {4}


def test_what_does_not_fit_begins_the_next_piece_and_no_draft_is_cut_off():
    first, second = Span(0, 60, 0, 0, (0,)), Span(60, 130, 3, 1, (1, 2))
    third = Span(130, 138, 64, 2, (3, 4), num_verify=8)
    assert shown(in_pieces((first, second, third), 100)) == [
        (0, 60, [(0, 60, 0, 0)]),
        (60, 138, [(0, 70, 3, 0), (70, 78, 64, 8)]),
    ]
    assert shown(in_pieces((first, second), 125)) == [
        (0, 121, [(0, 60, 0, 0), (60, 121, 3, 0)]),
        (121, 130, [(0, 9, 64, 0)]),
    ]
    waiting = Span(0, 70, 64, 0, (0, 1, 2), num_verify=6)
    assert shown(in_pieces((waiting,), 68)) == [
        (0, 64, [(0, 64, 64, 0)]),
        (64, 70, [(0, 6, 128, 6)]),
    ]
    assert [p.num_rows for p in in_pieces((waiting,), 3)] == [70]  # no page ends within 3


def test_steps_stay_together():
    spans = tuple(Span(i, i + 1, 9 + i, i, (i,)) for i in range(20))
    (steps,) = in_parts(spans, 4, 16, CPU)
    (piece,) = in_pieces((steps,), 8)
    assert (piece.start, piece.stop) == (0, 20)
    after = Span(20, 60, 0, 30, (30,))
    behind = in_pieces((steps, after), 50)
    assert [isinstance(p, Steps) for piece in behind for p in piece.parts] == [True, False]
    assert [(p.start, p.stop) for p in behind] == [(0, 20), (20, 60)]


def test_by_rows_gives_the_whole():
    x = torch.randn(2 * ROWS + 3, 5)
    seen = []

    def double(rows):
        seen.append(len(rows))
        return 2 * rows

    assert torch.equal(by_rows(double, x), 2 * x)
    assert seen == [ROWS, ROWS, 3]


def forward(monkeypatch, most):
    """Hidden states of a prompt, steps, drafts; then of a step behind them; and what is cached."""
    monkeypatch.setattr(network_module, "in_pieces", lambda parts: in_pieces(parts, most))
    network, cache = nano_network(), nano_cache(num_pages=20, num_slots=5)
    for tensor in cache.of_slots + cache.of_pages:
        tensor.fill_(50.0)
    ids = torch.randint(0, 4000, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    pages = {0: (9, 1, 7, 3, 5), 1: (0, 2), 2: (4, 6, 8), 3: (11, 10)}
    begin = [SequenceRows(ids[s : s + 69 + s], 0, s, pages[s]) for s in (1, 2, 3)]
    network.forward(Batch.of(begin, CPU), cache)
    rows = [
        SequenceRows(ids[100:101], 70, 1, pages[1]),
        SequenceRows(ids[:295], 0, 0, pages[0]),
        SequenceRows(ids[300:371], 71, 2, pages[2], num_verify=7),
        SequenceRows(ids[400:401], 72, 3, pages[3]),
    ]
    first = network.forward(Batch.of(rows, CPU), cache)
    cache.commit({2: 5})
    later = [
        SequenceRows(ids[500:503], 295, 0, pages[0]),
        SequenceRows(ids[9:10], 140, 2, pages[2]),
    ]
    second = network.forward(Batch.of(later, CPU), cache)
    return first, second, [*cache.of_slots, *cache.of_pages]


@pytest.mark.parametrize("most", [64, 100, 257])
@torch.inference_mode()
def test_results_and_cache_are_those_of_one_piece(monkeypatch, most):
    whole = forward(monkeypatch, 10_000)
    cut = forward(monkeypatch, most)
    for found, expected in zip(cut[:2], whole[:2], strict=True):
        assert relative_error(found, expected) < 2e-5
    for found, expected in zip(cut[2], whole[2], strict=True):
        assert relative_error(found, expected) < 2e-5


@torch.inference_mode()
def test_a_long_prompt_is_what_it_is_without_a_cache():
    network, num = nano_network(), 2 * ROWS + 21
    cache = nano_cache(num_pages=-(-num // 64), num_slots=1)
    ids = torch.randint(0, 4000, (num,), generator=torch.Generator().manual_seed(2))
    rows = SequenceRows(ids.tolist(), 0, 0, tuple(range(-(-num // 64))))
    hidden = network.forward(Batch.of([rows], CPU), cache)
    found = network.logits(hidden[-40:])
    assert relative_error(found, network.full(ids[None])[0, -40:]) < 1e-4
