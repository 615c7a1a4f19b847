"""The figures of a receipt, by hand on few positions and against numpy on many."""

import math

import numpy as np
import pytest

from emberbox.errors import MeasureError
from emberbox.measure.metrics import Positions
from emberbox.measure.record import as_stored
from emberbox.measure.summary import FIGURES, headlines, spread, summarise
from tests.helpers.receipts import small_panel, small_windows


def positions(kl, *, finite=None, top1=None, top5=None, nll=None):
    """Figures with this KL; the rest 0 or as given. NaN where not finite."""
    num = len(kl)
    finite = np.array(finite or [True] * num)
    kl, nll = np.array(kl, np.float64), np.array(nll or [0.0] * num)
    return Positions(
        *np.where(finite, [kl, 2 * kl, nll, nll + 1], np.nan),
        top1=np.array(top1 or [False] * num),
        top5=np.array(top5 or [0] * num, np.uint8),
        finite=finite,
    )


def test_means_are_over_positions_not_over_windows():
    found = headlines([positions([1.0]), positions([2.0, 3.0, 6.0])])
    assert found["kl"] == {"value": 3.0, "interval": None}
    assert found["reverse_kl"]["value"] == 6.0


def test_agreement_counts_positions_and_fifths():
    one = positions([0, 0, 0], top1=[True, False, True], top5=[5, 2, 3])
    found = headlines([one, positions([0], top1=[True], top5=[4])])
    assert found["top1"]["value"] == 0.75
    assert found["top5"]["value"] == pytest.approx(14 / 20, rel=1e-15)


def test_perplexity_is_the_exponential_of_the_mean():
    found = headlines([positions([0, 0], nll=[1.0, 2.0])])
    assert found["reference_perplexity"]["value"] == math.exp(1.5)
    assert found["candidate_perplexity"]["value"] == math.exp(2.5)


def test_the_bounds_of_a_perplexity_are_those_of_its_logarithm():
    windows = [positions([x], nll=[x]) for x in (0.5, 0.7, 0.8, 1.0, 1.9)]
    found = headlines(windows)
    expected = [math.exp(bound) for bound in found["kl"]["interval"]]
    assert found["reference_perplexity"]["interval"] == pytest.approx(expected, rel=1e-12)


def test_a_perplexity_beyond_floats_is_none():
    found = headlines([positions([0.0], nll=[699.5])] * 6)
    assert found["reference_perplexity"]["value"] == math.exp(699.5)
    assert found["candidate_perplexity"] == {"value": None, "interval": None}


def test_what_is_not_finite_is_counted_and_not_averaged_in():
    windows = [("a", "prose"), ("b", "prose"), ("c", "code")]
    record = {
        "a": positions([1.0, 0.0, 3.0], finite=[True, False, True], top1=[True, False, True]),
        "b": positions([0.0, 0.0], finite=[False, False]),
        "c": positions([8.0]),
    }
    found = summarise(windows, record)
    assert (found["positions"], found["non_finite"]) == (6, 3)
    assert found["kl"]["value"] == 4.0
    assert found["reverse_kl"]["value"] == 8.0
    assert found["reference_perplexity"]["value"] == 1.0
    assert found["candidate_perplexity"]["value"] == math.e
    assert found["top1"]["value"] == pytest.approx(2 / 3)
    a, b, c = found["windows"]
    assert (a["kl"], a["non_finite"], a["top1"]) == (2.0, 1, 1.0)
    assert b == {
        "id": "b",
        "domain": "prose",
        "positions": 2,
        "non_finite": 2,
        "kl": None,
        "kl_spread": None,
        "top1": None,
    }
    assert c["kl_spread"]["max"] == 8.0
    code, prose = found["domains"]
    assert (code["domain"], code["kl"]["value"], code["windows"]) == ("code", 8.0, 1)
    assert (prose["kl"]["value"], prose["positions"], prose["non_finite"]) == (2.0, 5, 3)


def test_nothing_finite_is_refused():
    with pytest.raises(MeasureError, match="no position has finite logits"):
        summarise([("a", "prose")], {"a": positions([0.0], finite=[False])})


@pytest.mark.parametrize("num", [1, 7, 20, 21, 130])
def test_spread_agrees_with_numpy(num):
    values = np.random.default_rng(num).random(num)
    finite = np.arange(num) % 5 != 3
    found = spread(positions(values, finite=finite.tolist()))
    values = np.sort(values[finite])
    for key, share in (("p50", 50), ("p95", 95), ("p99", 99)):
        assert found[key] == pytest.approx(np.percentile(values, share), rel=1e-14)
    assert found["max"] == values[-1]
    num_worst = -(-len(values) // 20)
    assert found["cvar95"] == pytest.approx(values[-num_worst:].mean(), rel=1e-14)


def test_the_worst_twentieth_is_rounded_up():
    values = np.arange(21.0)
    assert spread(positions(values))["cvar95"] == 19.5
    assert spread(positions(values[1:]))["cvar95"] == 20.0


def test_a_model_against_itself_is_exactly_0_and_1():
    panel = small_panel()
    record = as_stored(small_windows(panel, 0.0))
    found = summarise([(each.id, each.domain) for each in panel.windows], record)
    assert found["kl"] == {"value": 0.0, "interval": [0.0, 0.0]}
    assert found["reverse_kl"] == {"value": 0.0, "interval": [0.0, 0.0]}
    assert found["top1"] == {"value": 1.0, "interval": [1.0, 1.0]}
    assert found["top5"] == {"value": 1.0, "interval": [1.0, 1.0]}
    assert found["reference_perplexity"] == found["candidate_perplexity"]
    assert set(found["kl_spread"].values()) == {0.0}


def test_the_order_of_positions_does_not_matter():
    panel = small_panel()
    record = as_stored(small_windows(panel, 0.5))
    columns = ("kl", "reverse_kl", "reference_nll", "candidate_nll", "top1", "top5", "finite")
    turned = {
        name: Positions(**{column: getattr(each, column)[::-1] for column in columns})
        for name, each in record.items()
    }
    windows = [(each.id, each.domain) for each in panel.windows]
    assert summarise(windows, turned) == summarise(windows, record)


def test_every_figure_of_all_windows_has_an_interval_around_it():
    panel = small_panel()
    found = headlines(list(as_stored(small_windows(panel, 0.5)).values()))
    assert tuple(found) == FIGURES
    for figure in found.values():
        low, high = figure["interval"]
        assert low < figure["value"] < high
