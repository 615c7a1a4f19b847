"""Comparisons: paired by window, right by hand, and refused where receipts are unlike."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from emberbox.errors import MeasureError
from emberbox.measure import compare as module
from emberbox.measure.bootstrap import mean_intervals
from emberbox.measure.compare import (
    comparable_key,
    compare,
    compare_together,
    sign_test,
    unlike,
)
from emberbox.measure.metrics import Positions
from emberbox.measure.panel import Panel
from emberbox.measure.receipt import load, save
from tests.helpers.receipts import (
    artifact_facts,
    edit,
    measured,
    small_panel,
    small_windows,
    write_receipt,
)

PANEL = small_panel(windows=11)  # 6 of prose, 5 of code


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A plain candidate and a closer one, with a larger file."""
    folder = tmp_path_factory.mktemp("pair")
    plain = write_receipt(folder / "plain.json", 0.5, 1, PANEL)
    ours = artifact_facts("ours", 8008)
    return plain, write_receipt(folder / "ours.json", 0.4, 2, PANEL, candidate=ours)


def window_sums(receipt):
    return np.array([math.fsum(each.kl) for each in receipt.read_record().values()])


def test_the_difference_is_that_of_the_headlines(pair):
    plain, ours = pair
    found = compare(plain, ours)
    assert (found.base, found.new) == ("plain", "ours")
    assert (found.base_bytes, found.new_bytes) == (8000, 8008)
    assert found.all.base_kl == plain["results"]["kl"]["value"]
    assert found.all.new_kl == ours["results"]["kl"]["value"]
    assert found.all.difference == pytest.approx(found.all.new_kl - found.all.base_kl, rel=1e-12)
    assert found.all.relative == pytest.approx(found.all.new_kl / found.all.base_kl - 1, rel=1e-12)
    assert found.all.difference < 0
    assert (found.all.windows, found.all.positions) == (11, PANEL.num_positions)


def test_the_interval_is_of_the_paired_differences(pair):
    plain, ours = pair
    found = compare(plain, ours).all
    deltas = window_sums(ours) - window_sums(plain)
    counts = np.array([window.num_positions for window in PANEL.windows])
    assert found.interval == pytest.approx(mean_intervals(deltas[:, None], counts)[0])
    low, high = found.interval
    assert low < found.difference < high < 0
    # Pairing takes out what windows have in common: unpaired, the bounds are those far apart.
    apart = [receipt["results"]["kl"]["interval"] for receipt in pair]
    assert high - low < sum(b - a for a, b in apart)


def test_the_other_way_round_is_the_negative(pair):
    plain, ours = pair
    one, other = compare(plain, ours).all, compare(ours, plain).all
    assert other.difference == -one.difference
    assert (other.better, other.worse) == (one.worse, one.better)
    assert other.p_value == one.p_value


def with_means(path, values):
    """A receipt whose windows have these mean KLs."""
    panel = small_panel(windows=len(values))
    windows = small_windows(panel, 0.5)
    for (_, positions), value in zip(windows, values, strict=True):
        positions.kl[:] = value
    return save(path, measured(panel, windows), windows)


def test_windows_are_counted_and_ties_dropped(tmp_path):
    base = with_means(tmp_path / "a.json", [1, 2, 3, 4, 5, 6, 7])
    new = with_means(tmp_path / "b.json", [0.5, 2, 2.5, 3, 5, 5, 8])
    found = compare(base, new).all
    assert (found.better, found.worse, found.ties) == (4, 1, 2)
    assert found.p_value == 0.375  # 2 (1 + 5) / 2**5


@pytest.mark.parametrize(
    ("better", "worse", "expected"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 0, 2 / 32),
        (0, 5, 2 / 32),
        (3, 3, 1.0),
        (8, 2, 2 * (1 + 10 + 45) / 1024),
        (25, 0, 2 / 2**25),
        (18, 7, 0.0432853),  # R: binom.test(18, 25)$p.value
    ],
)
def test_sign_test_of_known_splits(better, worse, expected):
    assert sign_test(better, worse) == pytest.approx(expected, rel=1e-5)


def test_domains_with_enough_windows_are_compared(pair):
    found = compare(*pair)
    assert set(found.groups) == {"prose", "code"}
    assert (found.groups["prose"].windows, found.groups["code"].windows) == (6, 5)
    positions = sum(each.positions for each in found.groups.values())
    total = sum(each.difference * each.positions for each in found.groups.values())
    assert total / positions == pytest.approx(found.all.difference, rel=1e-12)


def test_domains_of_few_windows_are_not(tmp_path):
    panel = small_panel(windows=9)  # 5 of prose, 4 of code
    one, other = (write_receipt(tmp_path / f"{n}.json", 0.3, n, panel) for n in (1, 2))
    found = compare(one, other)
    assert set(found.groups) == {"prose"}
    assert found.groups["prose"].interval is not None


def test_groups_of_several_domains_can_be_named(pair):
    found = compare(*pair, groups={"any text": ("prose", "code"), "none": ("maths",)})
    assert found.groups["any text"] == found.all
    assert "none" not in found.groups


def test_a_receipt_against_itself_has_no_difference(pair):
    found = compare(pair[0], pair[0])
    assert (found.all.difference, found.all.interval, found.all.relative) == (0.0, (0.0, 0.0), 0.0)
    assert (found.all.better, found.all.worse, found.all.ties, found.all.p_value) == (0, 0, 11, 1.0)
    assert found.reference_nll_difference == 0.0
    assert found.left_out == 0


def test_relative_to_a_perfect_base_is_undefined(tmp_path):
    perfect = write_receipt(tmp_path / "a.json", 0.0)
    found = compare(perfect, write_receipt(tmp_path / "b.json", 0.2)).all
    assert found.relative is None
    assert found.better == 0


def with_hole(receipt, window, position):
    """The record of `receipt` with one position that is not finite, as a reader gets it."""
    record = receipt.read_record()
    record[window].finite[position] = False
    for column in ("kl", "reverse_kl", "reference_nll", "candidate_nll", "top1", "top5"):
        getattr(record[window], column)[position] = 0
    return record


def test_positions_that_one_of_them_lacks_are_left_out_of_both(pair):
    plain, ours = pair
    bases, news = with_hole(plain, "w03", 5), with_hole(ours, "w03", 6)
    found = module._pairs(bases, news)["w03"]
    both = np.delete(plain.read_record()["w03"].kl, [5, 6])
    assert found.left_out == 2
    assert found.positions == len(both)
    assert found.base == math.fsum(both)


def test_a_reference_that_ran_otherwise_shows(tmp_path, pair):
    plain, ours = pair
    record = ours.read_record()
    moved = {
        name: Positions(
            kl=each.kl,
            reverse_kl=each.reverse_kl,
            reference_nll=each.reference_nll + 0.25,
            candidate_nll=each.candidate_nll,
            top1=each.top1,
            top5=each.top5,
            finite=each.finite,
        )
        for name, each in record.items()
    }
    pairs = module._pairs(plain.read_record(), moved)
    assert pairs["w00"].reference_difference == pytest.approx(0.25, rel=1e-12)


UNLIKE = {
    "panel": (
        lambda d: d["panel"].update(sha256="ab" * 32, name="large"),
        f"panel: small ({small_panel().sha256[:12]}) in a, large (abababababab) in b",
    ),
    "lane": (lambda d: d.update(lane="served"), "lane: weights in a, served in b"),
    "metric version": (lambda d: d.update(metric_version=2), "metric version: 1 in a, 2 in b"),
    "weights": (
        lambda d: d["reference"].update(map_sha256="cd" * 32),
        f"weights of the reference: big ({artifact_facts('big')['map_sha256'][:12]}) in a, "
        "big (cdcdcdcdcdcd) in b",
    ),
    "config": (
        lambda d: d["reference"].update(config_sha256="ef" * 32),
        f"config of the reference: {artifact_facts('big')['config_sha256'][:12]} in a, "
        "efefefefefef in b",
    ),
    "activation type": (
        lambda document: document["settings"].update(dtype="bfloat16"),
        "activation type: float32 in a",
    ),
    "cache type": (
        lambda document: document["settings"].update(cache_dtype="bfloat16"),
        "cache type: none in a, bfloat16 in b",
    ),
    "chunk": (
        lambda document: document["settings"].update(chunk=64),
        "tokens of a step: 512 in a",
    ),
}


@pytest.fixture
def two(tmp_path):
    """a.json and b.json of a small panel."""
    return write_receipt(tmp_path / "a.json"), write_receipt(tmp_path / "b.json", 0.3)


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_receipts_are_refused_and_the_reason_said(two, name):
    base, new = two
    assert comparable_key(base) == comparable_key(new)
    change, said = UNLIKE[name]
    edit(new.path, change)
    changed = load(new.path)
    assert comparable_key(base) != comparable_key(changed)
    with pytest.raises(MeasureError) as caught:
        compare(base, changed)
    assert f"\n  - {said}" in caught.value.message
    assert not re.search("[0-9a-f]{13}", caught.value.message.partition("compared:")[2])
    assert caught.value.message.count("\n  - ") == 1


@pytest.mark.parametrize(
    ("key", "value"), [("direction", "candidate||reference"), ("head_policy", "reference's")]
)
def test_a_direction_or_head_policy_to_come_is_refused_too(two, key, value):
    # No receipt of today's schema can have another; a later one may.
    base, new = two
    new.document[key] = value
    (reason,) = unlike(base, new)
    was = {"direction": "reference||candidate", "head_policy": "own"}[key]
    assert reason == f"{key.replace('_', ' ')}: {was} in a, {value} in b"


def test_every_reason_is_said_at_once(two):
    base, new = two
    edit(new.path, UNLIKE["lane"][0])
    edit(new.path, UNLIKE["weights"][0])
    with pytest.raises(MeasureError, match=r"(?s)lane: .*weights of the reference: "):
        compare(base, load(new.path))


def test_other_windows_are_another_panel(two, tmp_path):
    fewer = small_panel(windows=6)
    other = write_receipt(tmp_path / "c.json", panel=fewer)
    with pytest.raises(MeasureError, match="panel: "):
        compare(two[0], other)


@pytest.mark.parametrize(
    "change",
    [
        lambda windows: windows[::-1],
        lambda windows: windows[:-1],
        lambda windows: (replace(windows[0], id="other"), *windows[1:]),
        lambda windows: (replace(windows[0], domain="other"), *windows[1:]),
        lambda windows: (replace(windows[0], token_ids=(1, 2, 3)), *windows[1:]),
    ],
    ids=["order", "fewer", "id", "domain", "tokens"],
)
def test_other_windows_under_the_hash_of_one_panel_are_refused(pair, tmp_path, change):
    forged = Panel(PANEL.name, tuple(change(PANEL.windows)), PANEL.sha256)
    crooked = write_receipt(tmp_path / "crooked.json", panel=forged)
    for base, new in ((pair[0], crooked), (crooked, pair[0])):
        assert list(unlike(base, new)) == [
            f"windows: {base.name} and {new.name} list different ones of one panel"
        ]
        with pytest.raises(MeasureError, match="list different ones"):
            compare(base, new)
    assert comparable_key(crooked) != comparable_key(pair[0])


def test_the_candidate_is_free_to_differ(two):
    base, new = two
    edit(new.path, lambda d: d["candidate"].update(config_sha256="12" * 32))
    assert list(unlike(base, load(new.path))) == []


def test_receipts_without_a_common_position_are_refused():
    with pytest.raises(MeasureError, match="nothing can be compared"):
        module._paired([module._Pair(0.0, 0.0, 0, 24, 0.0)])


def test_several_pairs_together_are_their_mean_window_by_window(tmp_path):
    bases = [write_receipt(tmp_path / f"a{n}.json", 0.5, n, PANEL) for n in range(3)]
    news = [write_receipt(tmp_path / f"b{n}.json", 0.45, 9 + n, PANEL) for n in range(3)]
    pairs = list(zip(bases, news, strict=True))
    assert compare_together(pairs[:1]) == compare(*pairs[0]).all
    assert compare_together(pairs[:1], ("code",)) == compare(*pairs[0]).groups["code"]
    found = compare_together(pairs)
    deltas = sum(window_sums(new) - window_sums(base) for base, new in pairs)
    counts = np.array([3 * window.num_positions for window in PANEL.windows])
    assert found.interval == pytest.approx(mean_intervals(deltas[:, None], counts)[0])
    assert (found.better, found.worse) == ((deltas < 0).sum(), (deltas > 0).sum())
    alone = [compare(*pair).all.difference for pair in pairs]
    assert found.difference == pytest.approx(sum(alone) / 3, rel=1e-12)
    assert (found.windows, found.positions) == (11, 3 * PANEL.num_positions)


def test_pairs_of_two_lanes_are_never_taken_together(two, tmp_path):
    base, new = two
    others = [write_receipt(tmp_path / f"{n}.json", lane="served") for n in "cd"]
    with pytest.raises(MeasureError, match="lane: weights in a, served in c"):
        compare_together([(base, new), tuple(others)])
