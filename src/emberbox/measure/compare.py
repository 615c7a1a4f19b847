"""Which of two candidates is closer to the same reference: windows paired, with an interval.

Two receipts may be compared when everything but the candidate is alike; otherwise the difference
says nothing, and it is refused with every reason. Knows receipts; knows no model.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from emberbox.errors import MeasureError
from emberbox.measure.bootstrap import MIN_WINDOWS, Interval, mean_intervals
from emberbox.measure.documents import canonical_json
from emberbox.measure.metrics import Positions
from emberbox.measure.receipt import Receipt

# (place in the receipt, what a reader calls it)
ALIKE = (
    ("panel.sha256", "panel"),
    ("lane", "lane"),
    ("direction", "direction"),
    ("head_policy", "head policy"),
    ("accumulation", "accumulation"),
    ("metric_version", "metric version"),
    ("settings.dtype", "activation type"),
    ("settings.cache_dtype", "cache type"),
    ("settings.chunk", "tokens of a step"),
    ("reference.map_sha256", "weights of the reference"),
    ("reference.config_sha256", "config of the reference"),
)
# Where the name stands that goes with a hash.
_NAMED = {"panel.sha256": "panel.name", "reference.map_sha256": "reference.name"}
_HEAD = 12  # digits of a hash that are shown, as everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Mean KL of two candidates over the same windows, in nats per position.

    difference: new - base, below 0 where the new one is closer; interval: its BCa bounds over
    windows, None for fewer than MIN_WINDOWS. relative: difference / base_kl, None for a base of 0.
    Windows count as better, worse or ties by their own mean; p_value: exact two-sided sign test
    without the ties.
    """

    windows: int
    positions: int
    base_kl: float
    new_kl: float
    difference: float
    interval: Interval | None
    relative: float | None
    better: int
    worse: int
    ties: int
    p_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`new` against `base`, names of candidates. groups: domains of MIN_WINDOWS windows or more.

    left_out: positions where one of the two is not finite. reference_nll_difference: mean absolute
    difference between what the two receipts say of the reference, 0 when it ran the same way.
    """

    base: str
    new: str
    panel: str
    lane: str
    base_bytes: int
    new_bytes: int
    all: Paired
    groups: Mapping[str, Paired]
    left_out: int
    reference_nll_difference: float

    def as_json(self) -> dict[str, object]:
        """For machines."""
        return asdict(self)


def compare(
    base: Receipt, new: Receipt, groups: Mapping[str, Collection[str]] | None = None
) -> Comparison:
    """Pair the windows of two receipts that `verify` found good.

    groups: more groups than the domains, name -> domains that belong to it. Raises MeasureError
    with every reason why the two may not be compared.
    """
    require_alike(base, new)
    pairs = _pairs(base.read_record(), new.read_record())
    domain_of = dict(base.windows)
    wanted = {domain: (domain,) for domain in sorted(set(domain_of.values()))} | dict(groups or {})
    by_group = {
        name: [pair for window, pair in pairs.items() if domain_of[window] in domains]
        for name, domains in wanted.items()
    }
    return Comparison(
        base=base["candidate"]["name"],
        new=new["candidate"]["name"],
        panel=base["panel"]["name"],
        lane=base["lane"],
        base_bytes=base["candidate"]["num_bytes"],
        new_bytes=new["candidate"]["num_bytes"],
        all=_paired(list(pairs.values())),
        groups={
            name: _paired(found) for name, found in by_group.items() if len(found) >= MIN_WINDOWS
        },
        left_out=sum(pair.left_out for pair in pairs.values()),
        reference_nll_difference=_mean([pair.reference_difference for pair in pairs.values()]),
    )


def compare_together(
    pairs: Sequence[tuple[Receipt, Receipt]], domains: Collection[str] | None = None
) -> Paired:
    """Several comparisons of one kind, such as a way of compressing under several seeds, as one.

    Each window counts with all its pairs together, so that the interval and the sign test are over
    windows and say how the mean over the pairs moves. domains: of the windows; None is all. Raises
    MeasureError where two of the receipts may not be compared.
    """
    receipts = [receipt for pair in pairs for receipt in pair]
    for other in receipts[1:]:
        require_alike(receipts[0], other)
    together: dict[str, _Pair] = {}
    domain_of = dict(receipts[0].windows)
    for base, new in pairs:
        for window, found in _pairs(base.read_record(), new.read_record()).items():
            if domains is None or domain_of[window] in domains:
                old = together.get(window)
                together[window] = found if old is None else old.joined(found)
    return _paired(list(together.values()))


def require_alike(base: Receipt, new: Receipt) -> None:
    """Raises MeasureError with every reason why the two may not be compared."""
    reasons = list(unlike(base, new))
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        raise MeasureError(
            f"{base.path} and {new.path} may not be compared:{lines}",
            hint="measure both candidates on one panel, in one lane, against one reference",
        )


def unlike(base: Receipt, new: Receipt) -> Iterator[str]:
    """Why the two may not be compared, a sentence each; nothing when they may."""
    for place, meaning in ALIKE:
        one, other = (_at(receipt, place) for receipt in (base, new))
        if one != other:
            shown = (_shown(receipt, place) for receipt in (base, new))
            yield f"{meaning}: {next(shown)} in {base.name}, {next(shown)} in {new.name}"
    panels = base["panel"], new["panel"]
    if panels[0]["sha256"] == panels[1]["sha256"] and panels[0]["windows"] != panels[1]["windows"]:
        yield f"windows: {base.name} and {new.name} list different ones of one panel"


def comparable_key(receipt: Receipt) -> tuple[object, ...]:
    """Equal for two receipts that may be compared."""
    alike = (_at(receipt, place) for place, _ in ALIKE)
    return *alike, canonical_json(receipt["panel"]["windows"])


def sign_test(num_better: int, num_worse: int) -> float:
    """Two-sided probability of a split at least this uneven when both are equally likely."""
    num = num_better + num_worse
    tail = sum(math.comb(num, each) for each in range(min(num_better, num_worse) + 1))
    return min(1.0, 2 * tail / (1 << num))


@dataclass(frozen=True, slots=True)
class _Pair:
    """One window: sums of KL over positions where both are finite, and how many they are."""

    base: float
    new: float
    positions: int
    left_out: int
    reference_difference: float

    def joined(self, other: "_Pair") -> "_Pair":
        """The same window under two pairs of candidates."""
        return _Pair(
            self.base + other.base,
            self.new + other.new,
            self.positions + other.positions,
            self.left_out + other.left_out,
            max(self.reference_difference, other.reference_difference),
        )


def _pairs(base: Mapping[str, Positions], new: Mapping[str, Positions]) -> dict[str, _Pair]:
    pairs = {}
    for window, one in base.items():
        other = new[window]
        both = one.finite & other.finite
        pairs[window] = _Pair(
            math.fsum(one.kl[both]),
            math.fsum(other.kl[both]),
            int(both.sum()),
            int((~both).sum()),
            _mean(np.abs(one.reference_nll[both] - other.reference_nll[both])),
        )
    return pairs


def _paired(pairs: Sequence[_Pair]) -> Paired:
    counts = np.array([pair.positions for pair in pairs], np.int64)  # [W]
    num_positions = int(counts.sum())
    if not num_positions:
        raise MeasureError("no position is finite in both receipts: nothing can be compared")
    deltas = np.array([pair.new - pair.base for pair in pairs], np.float64)  # [W] sums, not means
    base_kl = math.fsum(pair.base for pair in pairs) / num_positions
    new_kl = math.fsum(pair.new for pair in pairs) / num_positions
    difference = math.fsum(deltas) / num_positions
    better, worse = int((deltas < 0).sum()), int((deltas > 0).sum())
    return Paired(
        windows=len(pairs),
        positions=num_positions,
        base_kl=base_kl,
        new_kl=new_kl,
        difference=difference,
        interval=mean_intervals(deltas[:, None], counts)[0],
        relative=difference / base_kl if base_kl > 0 else None,
        better=better,
        worse=worse,
        ties=len(pairs) - better - worse,
        p_value=sign_test(better, worse),
    )


def _shown(receipt: Receipt, place: str) -> str:
    """What stands there, for people: of a hash the name that goes with it, and its first digits."""
    found = _at(receipt, place)
    if not place.endswith("sha256"):
        return "none" if found is None else str(found)
    head = str(found)[:_HEAD]
    return f"{_at(receipt, _NAMED[place])} ({head})" if place in _NAMED else head


def _at(receipt: Receipt, place: str) -> object:
    found: object = receipt.document
    for key in place.split("."):
        assert isinstance(found, dict), "the form was checked"
        # The lane `weights` has no cache and no steps: a setting that is not there is None.
        found = found.get(key) if "settings" in place else found[key]
    return found


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    return float(math.fsum(values) / len(values)) if len(values) else 0.0
