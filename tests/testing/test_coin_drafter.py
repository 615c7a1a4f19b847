"""The coin: right as often as asked, wrong otherwise, the same for every order of calls."""

import math

import pytest

from emberbox.errors import SettingsError
from emberbox.testing.coin_drafter import CoinDrafter, oracle_of

REPLY = tuple((7 * i) % 50 for i in range(4000))
ORACLE = oracle_of({1: REPLY, 2: REPLY})


def matches(drafts, reply=REPLY):
    return [draft == right for draft, right in zip(drafts, reply, strict=True)]


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_drafts_are_right_with_the_given_probability(probability):
    drafts = CoinDrafter(probability, 5, ORACLE).propose(1, (), len(REPLY))
    num_right = sum(matches(drafts))
    spread = math.sqrt(len(REPLY) * probability * (1 - probability))
    assert abs(num_right - len(REPLY) * probability) <= 4 * spread
    assert all(0 <= draft < 50 for draft in drafts)


def test_every_pattern_of_right_and_wrong_occurs():
    drafts = CoinDrafter(0.5, 1, ORACLE).propose(1, (), len(REPLY))
    hits = matches(drafts)
    assert len({tuple(hits[i : i + 7]) for i in range(len(hits) - 7)}) == 2**7


def test_a_coin_depends_on_seed_request_and_position_alone():
    drafter = CoinDrafter(0.5, 5, ORACLE)
    whole = drafter.propose(1, (), 100)
    for start in (90, 3, 0, 57, 3):
        assert drafter.propose(1, REPLY[:start], 7) == whole[start : start + 7]
    assert drafter.propose(2, (), 100) != whole
    assert CoinDrafter(0.5, 6, ORACLE).propose(1, (), 100) != whole


def test_no_more_drafts_than_asked_for_or_known():
    drafter = CoinDrafter(1.0, 0, oracle_of({1: [4, 5, 6]}))
    assert drafter.propose(1, (), 2) == (4, 5)
    assert drafter.propose(1, (4,), 7) == (5, 6)
    assert drafter.propose(1, (4, 5, 6), 7) == ()
    assert drafter.propose(1, (), 0) == ()
    assert drafter.propose(9, (), 7) == ()


def test_a_wrong_draft_for_token_0_is_another_token():
    assert CoinDrafter(0.0, 0, oracle_of({1: [0, 1]})).propose(1, (), 7) == (1, 0)


@pytest.mark.parametrize("probability", [-0.1, 1.1, math.nan])
def test_a_probability_outside_0_to_1_is_refused(probability):
    with pytest.raises(SettingsError):
        CoinDrafter(probability, 0, ORACLE)
