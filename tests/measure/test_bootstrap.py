"""Intervals: against the formula by hand, a slow version, every resample, and normal tables."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest

from emberbox.measure.bootstrap import (
    MIN_WINDOWS,
    NUM_RESAMPLES,
    SEED,
    bca,
    mean_intervals,
    quantile,
)

SKEWED = (0.011, 0.013, 0.014, 0.016, 0.02, 0.021, 0.027, 0.06, 0.19)


def one_interval(values, counts=None):
    """The interval of a mean of windows; counts: positions of each, 1 by default."""
    counts = np.array(counts or [1] * len(values), np.int64)
    sums = (np.array(values) * counts)[:, None]
    return mean_intervals(sums, counts)[0]


def slow_bca(sums, counts, means):
    """Efron's formula in plain Python, given the means of the resamples."""
    normal = NormalDist()
    mean = sum(sums) / sum(counts)
    below = sum(m < mean - 1e-12 for m in means) + sum(abs(m - mean) <= 1e-12 for m in means) / 2
    bias = normal.inv_cdf(below / len(means))
    windows = list(zip(sums, counts, strict=True))
    left_out = [(sum(sums) - s) / (sum(counts) - c) for s, c in windows]
    centre = sum(left_out) / len(left_out)
    cubes = sum((centre - each) ** 3 for each in left_out)
    squares = sum((centre - each) ** 2 for each in left_out)
    acceleration = cubes / (6 * squares**1.5)
    ordered = sorted(means)
    bounds = []
    for z in (-1.959963984540054, 1.959963984540054):
        share = normal.cdf(bias + (bias + z) / (1 - acceleration * (bias + z)))
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        step = ordered[min(low + 1, len(ordered) - 1)] - ordered[low]
        bounds.append(ordered[low] + (place - low) * step)
    return bounds


def slow_means(sums, counts):
    """The means of the same draws, one number at a time."""
    num, stream = len(sums), np.random.PCG64(SEED)
    totals, positions = [0.0] * NUM_RESAMPLES, [0] * NUM_RESAMPLES
    for _ in range(num):
        for index, raw in enumerate(stream.random_raw(NUM_RESAMPLES).tolist()):
            drawn = (raw >> 32) * num >> 32
            totals[index] += sums[drawn]
            positions[index] += counts[drawn]
    return [total / count for total, count in zip(totals, positions, strict=True)]


@pytest.mark.parametrize("counts", [(1,) * 9, (5, 1, 40, 7, 130, 2, 3, 11, 60)], ids=str)
def test_a_skewed_sample_gives_what_the_formula_gives(counts):
    sums = [value * count for value, count in zip(SKEWED, counts, strict=True)]
    expected = slow_bca(sums, counts, slow_means(sums, counts))
    assert one_interval(SKEWED, counts) == pytest.approx(expected, rel=1e-12)


def test_resampling_comes_near_all_resamples_there_are():
    values = SKEWED[2:8]  # 6**6 = 46,656 resamples, each of them
    means = [sum(drawn) / 6 for drawn in itertools.product(values, repeat=6)]
    low, high = one_interval(values)
    expected = slow_bca(values, [1] * 6, means)
    assert low == pytest.approx(expected[0], rel=0.01)
    assert high == pytest.approx(expected[1], rel=0.02)


def test_the_correction_moves_the_interval_of_a_skewed_sample_up():
    ordered = np.sort(slow_means(SKEWED, [1] * 9))
    low, high = one_interval(SKEWED)
    assert low > quantile(ordered, 0.025) * 1.03
    assert high > quantile(ordered, 0.975) * 1.1


def test_a_symmetric_sample_gives_the_percentiles():
    resampled = np.linspace(-1, 1, 2001)
    left_out = np.array([-0.3, -0.1, 0.0, 0.1, 0.3])
    assert bca(0.0, resampled, left_out) == pytest.approx((-0.95, 0.95), abs=1e-9)


@pytest.mark.parametrize(
    ("value", "left_out", "expected"),
    [
        # No skew; 60 % lie below: bias 0.253347, bounds at normal(2 x bias -+ 1.959964).
        (0.6, [-1.0, 0.0, 1.0], (0.0730744, 0.9931810)),
        # One window of five apart: skewness sum d^3 / (sum d^2)^1.5 = 0.6708204, a sixth of it.
        (0.5, [0.8, 1.05, 1.05, 1.05, 1.05], (0.0539534, 0.9939630)),
    ],
)
def test_known_values(value, left_out, expected):
    # Uniform resamples: a bound is the probability it lies at.
    resampled = np.linspace(0, 1, 100_001)
    assert bca(value, resampled, np.array(left_out)) == pytest.approx(expected, abs=2e-5)


def test_equal_windows_give_no_width():
    assert one_interval([0.1] * 7) == pytest.approx((0.1, 0.1), abs=0)
    assert one_interval([0.0] * 7, [3, 1, 2, 5, 8, 1, 1]) == (0.0, 0.0)


def test_one_window_apart_from_equal_ones_is_no_failure():
    low, high = one_interval([0.1, 0.1, 0.1, 0.1, 0.9])
    assert 0.1 <= low < 0.26 < high <= 0.9


def test_windows_weigh_by_their_positions():
    values, counts = [0.1, 0.12, 0.09, 0.11, 0.1, 100.0], [1000, 900, 1100, 1000, 950, 1]
    low, high = one_interval(values, counts)
    mean = sum(v * c for v, c in zip(values, counts, strict=True)) / sum(counts)
    assert low < mean < high
    assert high < 0.5  # were every window worth the same, the mean would be near 17


def test_windows_without_positions_are_left_out():
    values = [*SKEWED, 123.0]
    assert one_interval(values, [1] * 9 + [0]) == one_interval(SKEWED)


def test_too_few_windows_have_no_interval():
    assert one_interval(SKEWED[: MIN_WINDOWS - 1]) is None
    assert one_interval(SKEWED[:MIN_WINDOWS]) is not None
    assert one_interval(SKEWED[:MIN_WINDOWS], [1, 1, 1, 1, 0]) is None


def test_each_column_has_the_interval_it_has_alone():
    columns = np.array([SKEWED, SKEWED[::-1], np.arange(9.0)]).T
    together = mean_intervals(columns, np.ones(9, np.int64))
    assert together == [one_interval(column) for column in columns.T]


def test_the_draws_are_the_same_everywhere():
    # Pinned: another machine or numpy that draws otherwise could not verify our receipts.
    pinned = (0.01922222222222222, 0.10554646282927166)
    assert one_interval(SKEWED) == pytest.approx(pinned, rel=1e-12)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.25, 1.75), (0.5, 2.5), (0.99, 6.88), (1.0, 7.0)]
)
def test_a_quantile_lies_between_its_neighbours(share, expected):
    assert quantile(np.array([1.0, 2.0, 3.0, 7.0]), share) == pytest.approx(expected)
