"""The figures of a receipt, from its record alone. Knows positions and windows; knows no model.

Means are over all positions with finite logits, intervals over windows (bootstrap.py), sums exact.
Perplexity is the exponential of a mean negative log-likelihood, and so are its bounds.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from emberbox.errors import MeasureError
from emberbox.measure.bootstrap import LEVEL, NUM_RESAMPLES, SEED, mean_intervals, quantile
from emberbox.measure.metrics import TOP_K, Positions

# What a receipt says of all windows together, in this order; each with an interval.
FIGURES = (
    "kl",
    "reverse_kl",
    "top1",
    "top5",
    "reference_perplexity",
    "candidate_perplexity",
)
_PERPLEXITIES = FIGURES[4:]
_TAIL = 20  # cvar95 is the mean over the worst 1 in 20
_MAX_NLL = 700.0  # e**700 is near the largest float64

Results = dict[str, object]


def summarise(windows: Sequence[tuple[str, str]], record: Mapping[str, Positions]) -> Results:
    """Everything a receipt says in `results`, of windows (id, domain) and their positions.

    Raises MeasureError when no position of any window is finite.
    """
    found = [record[name] for name, _ in windows]
    domains = sorted({domain for _, domain in windows})
    whole = Positions.join(found)
    if not whole.finite.any():
        raise MeasureError(
            "no position has finite logits: there is nothing to report",
            hint="look at the candidate with `emberbox chat` first",
        )
    figures = headlines(found)
    return {
        "positions": len(whole),
        "non_finite": int((~whole.finite).sum()),
        "bootstrap": {"resamples": NUM_RESAMPLES, "seed": SEED, "level": LEVEL},
        **figures,
        "kl_spread": spread(whole),
        "domains": [
            _of_domain(name, [record[each] for each, domain in windows if domain == name])
            for name in domains
        ],
        "windows": [_of_window(name, domain, record[name]) for name, domain in windows],
    }


def headlines(windows: Sequence[Positions]) -> dict[str, dict[str, object]]:
    """FIGURES of these windows together: {"kl": {"value": ..., "interval": [...] or None}, ...}.

    The value is None when no position is finite, and for a perplexity too large for a float.
    """
    sums = np.array([_sums(each) for each in windows])  # [W, S]
    counts = np.array([int(each.finite.sum()) for each in windows], np.int64)
    num_positions = int(counts.sum())
    found: dict[str, dict[str, object]] = {}
    for name, column, interval in zip(FIGURES, sums.T, mean_intervals(sums, counts), strict=True):
        value = math.fsum(column) / num_positions if num_positions else None
        as_shown = _exp if name in _PERPLEXITIES else _unchanged
        bounds = None if interval is None else [as_shown(bound) for bound in interval]
        found[name] = {
            "value": None if value is None else as_shown(value),
            "interval": None if bounds is None or None in bounds else bounds,
        }
    return found


def spread(positions: Positions) -> dict[str, float] | None:
    """How KL is spread over positions; None when none is finite."""
    values = np.sort(positions.kl[positions.finite])
    if not len(values):
        return None
    worst = values[-math.ceil(len(values) / _TAIL) :]
    return {
        "p50": quantile(values, 0.5),
        "p95": quantile(values, 0.95),
        "p99": quantile(values, 0.99),
        "max": float(values[-1]),
        "cvar95": math.fsum(worst) / len(worst),
    }


def _sums(positions: Positions) -> list[float]:
    """The sums behind FIGURES, in their order, over finite positions."""
    finite = positions.finite
    return [
        math.fsum(positions.kl[finite]),
        math.fsum(positions.reverse_kl[finite]),
        float(positions.top1[finite].sum()),
        float(positions.top5[finite].sum(dtype=np.int64)) / TOP_K,
        math.fsum(positions.reference_nll[finite]),
        math.fsum(positions.candidate_nll[finite]),
    ]


def _of_window(name: str, domain: str, positions: Positions) -> Results:
    finite = positions.finite
    num = int(finite.sum())
    return {
        "id": name,
        "domain": domain,
        "positions": len(finite),
        "non_finite": len(finite) - num,
        "kl": math.fsum(positions.kl[finite]) / num if num else None,
        "kl_spread": spread(positions),
        "top1": float(positions.top1[finite].sum()) / num if num else None,
    }


def _of_domain(name: str, windows: Sequence[Positions]) -> Results:
    whole, figures = Positions.join(windows), headlines(windows)
    return {
        "domain": name,
        "windows": len(windows),
        "positions": len(whole),
        "non_finite": int((~whole.finite).sum()),
        "kl": figures["kl"],
        "kl_spread": spread(whole),
        "top1": figures["top1"],
    }


def _unchanged(value: float) -> float | None:
    return value


def _exp(nll: float) -> float | None:
    return math.exp(nll) if nll <= _MAX_NLL else None
