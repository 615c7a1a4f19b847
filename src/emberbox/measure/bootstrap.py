"""BCa bootstrap intervals over windows. Knows sums and counts per window; knows no model.

The same numbers on every machine: the draws are the raw stream of PCG64 (of its generators numpy
promises only that one for ever), and every sum is taken in a fixed order or exactly.
Efron, "Better bootstrap confidence intervals", JASA 82 (1987).
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 10_000
SEED = 0
LEVEL = 0.95
MIN_WINDOWS = 5  # below, 10,000 resamples show few different values and an interval says nothing

Interval = tuple[float, float]
_NORMAL = NormalDist()
_TIE = 1e-12  # relative; the same windows summed in another order differ by less


def mean_intervals(sums: NDArray[np.float64], counts: NDArray[np.int64]) -> list[Interval | None]:
    """The interval of each mean over positions when whole windows are drawn.

    sums: [W, S] float64, S figures summed over the positions of each of W windows; counts: [W].
    A window without positions is left out; None for fewer than MIN_WINDOWS.
    """
    sums, counts = sums[counts > 0], counts[counts > 0]
    if len(counts) < MIN_WINDOWS:
        return [None] * sums.shape[1]
    resampled = _resampled(sums, counts)  # [B, S]
    intervals: list[Interval | None] = []
    for column, means in zip(sums.T, resampled.T, strict=True):
        total, num_positions = math.fsum(column), int(counts.sum())
        left_out = (total - column) / (num_positions - counts)  # [W], without each window
        intervals.append(bca(total / num_positions, means, left_out))
    return intervals


def bca(value: float, resampled: NDArray[np.float64], left_out: NDArray[np.float64]) -> Interval:
    """The bias-corrected and accelerated interval of `value`.

    resampled: [B], the value over each resample; left_out: [W], it without each of the windows.
    """
    tie = _TIE * float(np.abs(resampled).max())
    if resampled.max() - resampled.min() <= tie:
        return value, value
    below = int((resampled < value - tie).sum())
    equal = int((np.abs(resampled - value) <= tie).sum())
    num = len(resampled)
    share = min(max((below + equal / 2) / num, 0.5 / num), 1 - 0.5 / num)
    bias = _NORMAL.inv_cdf(share)
    acceleration = _acceleration(left_out)
    ordered = np.sort(resampled)
    low, high = (
        quantile(ordered, _adjusted(tail, bias, acceleration))
        for tail in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    )
    return low, high


def quantile(ordered: NDArray[np.float64], share: float) -> float:
    """The value that `share` of the ascending `ordered` [n] lie below; linear between two."""
    place = share * (len(ordered) - 1)
    low = min(int(place), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    below, above = float(ordered[low]), float(ordered[high])
    return below + (above - below) * (place - low)


def _resampled(sums: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """[B, S]: the means over NUM_RESAMPLES draws of W of the W windows."""
    num_windows = len(counts)
    totals = np.zeros((NUM_RESAMPLES, sums.shape[1]))
    positions = np.zeros(NUM_RESAMPLES, np.int64)
    stream = np.random.PCG64(SEED)
    for _ in range(num_windows):
        # The upper half of 64 random bits, scaled: uneven by less than W / 2**32.
        upper = stream.random_raw(NUM_RESAMPLES) >> np.uint64(32)
        drawn = ((upper * np.uint64(num_windows)) >> np.uint64(32)).astype(np.int64)  # [B]
        totals += sums[drawn]
        positions += counts[drawn]
    return totals / positions[:, None]


def _acceleration(left_out: NDArray[np.float64]) -> float:
    """A sixth of the skewness of what each window contributes; at most 1/6 in size."""
    centre = math.fsum(left_out) / len(left_out)
    away = [centre - float(each) for each in left_out]
    largest = max(map(abs, away))
    if largest == 0:
        return 0.0
    scaled = [each / largest for each in away]
    squares = math.fsum(each * each for each in scaled)
    return math.fsum(each**3 for each in scaled) / (6 * squares * math.sqrt(squares))


def _adjusted(tail: float, bias: float, acceleration: float) -> float:
    """Where in the resamples the bound for `tail` lies."""
    z = bias + _NORMAL.inv_cdf(tail)
    return _NORMAL.cdf(bias + z / (1 - acceleration * z))
