"""The figures of a position, against long double, against known values, and against themselves."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberbox.errors import MeasureError
from emberbox.measure import metrics
from emberbox.measure.metrics import VOCABULARY_BLOCK, Positions, position_metrics

ALL = [field.name for field in fields(Positions)]
# Steps of 2^-8 up to 2^6: sums and shifts of such logits are exact in float32.
GRID = st.integers(-(2**14), 2**14).map(lambda step: step / 256)


def measured(reference, candidate, targets=None) -> Positions:
    a, b = (torch.from_numpy(np.asarray(x, np.float32)) for x in (reference, candidate))
    return position_metrics(
        a, b, torch.zeros(len(a), dtype=torch.int64) if targets is None else torch.tensor(targets)
    )


def random_logits(n: int, V: int, seed: int, scale: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n, V, generator=generator) * scale
    return a, a + torch.randn(n, V, generator=generator) * 0.5


def bits(positions: Positions) -> list[bytes]:
    return [getattr(positions, name).tobytes() for name in ALL]


def log_softmax(logits: torch.Tensor) -> np.ndarray:
    """In long double, by the textbook."""
    x = logits.numpy().astype(np.longdouble)
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


@st.composite
def two_rows(draw):
    V = draw(st.integers(1, 40))
    row = st.lists(GRID, min_size=V, max_size=V)
    return draw(row), draw(row)


def test_known_values_and_the_direction():
    found = measured(np.log([[0.75, 0.25], [0.5, 0.5]]), np.log([[0.5, 0.5], [0.75, 0.25]]), [1, 0])
    there = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    back = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert found.kl == pytest.approx([there, back], abs=1e-7)  # the logits are float32
    assert found.reverse_kl == pytest.approx([back, there], abs=1e-7)
    assert found.reference_nll == pytest.approx([math.log(4), math.log(2)], abs=1e-7)
    assert found.candidate_nll == pytest.approx([math.log(2), -math.log(0.75)], abs=1e-7)


@pytest.mark.parametrize("V", [1, 7, 1000, VOCABULARY_BLOCK + 3, 3 * VOCABULARY_BLOCK - 1])
def test_sums_over_the_whole_vocabulary_are_those_of_long_double(V):
    a, b = random_logits(5, V, seed=V)
    targets = torch.tensor([0, V - 1, V // 2, V // 3, 0])
    p, q = log_softmax(a), log_softmax(b)
    found = position_metrics(a, b, targets)
    rows = np.arange(5)
    assert np.abs(found.kl - (np.exp(p) * (p - q)).sum(1)).max() < 1e-14
    assert np.abs(found.reverse_kl - (np.exp(q) * (q - p)).sum(1)).max() < 1e-14
    assert np.abs(found.reference_nll + p[rows, targets]).max() < 1e-14
    assert np.abs(found.candidate_nll + q[rows, targets]).max() < 1e-14
    best = [[set(row.argsort()[-5:]) for row in x.numpy()] for x in (a, b)]
    assert found.top5.tolist() == [len(x & y) for x, y in zip(*best, strict=True)]
    assert found.top1.tolist() == (a.argmax(1) == b.argmax(1)).tolist()
    assert found.finite.all()


@given(two_rows())
def test_a_distribution_is_nothing_away_from_itself(rows):
    found = measured([rows[0]], [rows[0]])
    assert found.kl.tolist() == found.reverse_kl.tolist() == [0.0]
    assert found.top1.tolist() == [True]
    assert found.top5.tolist() == [min(5, len(rows[0]))]


@given(two_rows(), GRID, GRID)
def test_a_constant_added_to_all_logits_changes_no_bit(rows, one, other):
    plain = measured([rows[0]], [rows[1]])
    moved = measured([np.add(rows[0], one)], [np.add(rows[1], other)])
    assert bits(moved) == bits(plain)


@given(two_rows(), st.floats(0, 1e-6))
def test_divergences_are_not_negative_beyond_rounding(rows, size):
    found = measured([rows[0]] * 2, [rows[1], np.multiply(rows[0], 1 + size)])
    assert min(found.kl.min(), found.reverse_kl.min()) > -1e-13


def test_swapping_the_two_swaps_the_figures():
    a, b = random_logits(9, 333, seed=4)
    targets = torch.arange(9)
    found, swapped = position_metrics(a, b, targets), position_metrics(b, a, targets)
    assert swapped.kl.tolist() == found.reverse_kl.tolist()
    assert swapped.reference_nll.tolist() == found.candidate_nll.tolist()
    assert swapped.top1.tolist() == found.top1.tolist()
    assert (found.kl != found.reverse_kl).all()


@pytest.mark.parametrize("V", [97, VOCABULARY_BLOCK + 3])
def test_how_many_rows_are_given_at_once_changes_no_bit(monkeypatch, V):
    a, b = random_logits(23, V, seed=1)
    targets = torch.arange(23)
    whole = position_metrics(a, b, targets)
    alone = [position_metrics(a[i : i + 1], b[i : i + 1], targets[i : i + 1]) for i in range(23)]
    assert bits(Positions.join(alone)) == bits(whole)
    for rows in (1, 2, 7, 22):
        monkeypatch.setattr(metrics, "ROWS", rows)
        assert bits(position_metrics(a, b, targets)) == bits(whole)


def test_the_number_of_threads_changes_no_bit():
    a, b = random_logits(3, 2 * VOCABULARY_BLOCK, seed=2)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(bits(position_metrics(a, b, torch.arange(3))))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_of_equal_logits_the_lowest_id_counts():
    tied = [0.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]  # best: 1; best five: 1 2 3 4 5
    found = measured(
        [tied] * 4,
        [
            [0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # best: 1; best five: 1 0 2 3 4
            [0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0],  # best: 2; best five: 2 0 1 3 4
            [9.0, 0.0, 0.0, 9.0, 9.0, 9.0, 9.0],  # best: 0; best five: 0 3 4 5 6
            [-1.0, -0.0, 0.0, -2.0, -2.0, -2.0, -1.0],  # best: 1, as -0 is 0; 1 2 0 6 3
        ],
    )
    assert found.top1.tolist() == [True, False, False, True]
    assert found.top5.tolist() == [4, 4, 3, 3]


def test_ties_go_to_the_lowest_id_across_blocks_too():
    V = VOCABULARY_BLOCK + 10
    a, b = torch.full((1, V), -3.0), torch.full((1, V), -3.0)
    a[0, [3, VOCABULARY_BLOCK + 2]] = 1.0
    b[0, VOCABULARY_BLOCK + 2] = 1.0
    # a: 3, then the one behind the border, 0 1 2; b: the one behind the border, 0 1 2 3.
    found = measured(a, b)
    assert (found.top1.tolist(), found.top5.tolist()) == ([False], [5])
    b[0, VOCABULARY_BLOCK + 2], b[0, 3] = -3.0, 1.0
    found = measured(a, b)  # b: 3 0 1 2 4
    assert (found.top1.tolist(), found.top5.tolist()) == ([True], [4])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whose", [0, 1])
def test_what_is_not_finite_is_counted_and_touches_no_other_position(value, whose):
    logits = random_logits(4, 50, seed=3)
    good = position_metrics(*logits, torch.arange(4))
    logits[whose][2, 17] = value
    found = position_metrics(*logits, torch.arange(4))
    assert found.finite.tolist() == [True, True, False, True]
    assert not found.top1[2]
    assert found.top5[2] == 0
    for name in ("kl", "reverse_kl", "reference_nll", "candidate_nll"):
        values = getattr(found, name)
        assert math.isnan(values[2])
        assert np.delete(values, 2).tolist() == np.delete(getattr(good, name), 2).tolist()


def test_logits_of_any_size_give_finite_figures():
    found = measured([[3e38, -3e38, 0.0]], [[-3e38, 3e38, 0.0]])
    assert found.finite.tolist() == [True]
    assert found.kl.tolist() == found.reverse_kl.tolist() == [pytest.approx(6e38)]


def test_no_positions_give_no_figures():
    assert len(position_metrics(torch.empty(0, 5), torch.empty(0, 5), torch.tensor([]).long())) == 0


@pytest.mark.parametrize(
    ("reference", "candidate", "targets", "said"),
    [
        (torch.zeros(2, 5), torch.zeros(2, 6), [0, 0], r"\[2, 5\], \[2, 6\] and \[2\]"),
        (torch.zeros(2, 5), torch.zeros(2, 5), [0], r"\[2, 5\], \[2, 5\] and \[1\]"),
        (torch.zeros(2, 5), torch.zeros(2, 5), [0, 5], "outside the vocabulary of 5"),
        (torch.zeros(2, 5), torch.zeros(2, 5), [-1, 0], "outside the vocabulary of 5"),
        (torch.zeros(2, 5).double(), torch.zeros(2, 5), [0, 0], "float64, expected float32"),
        (torch.zeros(2, 5), torch.zeros(2, 5).bfloat16(), [0, 0], "bfloat16, expected float32"),
    ],
)
def test_what_does_not_fit_is_refused(reference, candidate, targets, said):
    with pytest.raises(MeasureError, match=said):
        position_metrics(reference, candidate, torch.tensor(targets))


@pytest.mark.gpu
@pytest.mark.parametrize("V", [97, VOCABULARY_BLOCK + 3])
def test_a_gpu_gives_the_figures_of_a_cpu(V):
    a, b = random_logits(300, V, seed=5)
    targets = torch.arange(300) % V
    found = position_metrics(a.cuda(), b.cuda(), targets.cuda())
    expected = position_metrics(a, b, targets)
    assert np.abs(found.kl - expected.kl).max() < 1e-14
    assert found.top1.tolist() == expected.top1.tolist()
    assert found.top5.tolist() == expected.top5.tolist()
