"""Parameters out of range are refused by name; those at the edge are taken."""

import math

import pytest

from emberbox.engine.request import (
    MAX_STOP_TOKEN_IDS,
    FinishReason,
    RequestEvent,
    SamplingParams,
    TokenEvent,
)
from emberbox.errors import RequestError

REFUSED = {
    "max_tokens": (0, 2.5, True, "3"),
    "temperature": (-0.1, 100.5, math.nan, math.inf, 10**400, "1", None, True),
    "top_p": (0.0, -0.1, 1.1, math.nan, None),
    "top_k": (-1, 1.5, None, True),
    "min_p": (-0.1, 1.1, math.nan, None, "0"),
    "presence_penalty": (-2.1, 2.1, math.nan, None),
    "frequency_penalty": (-2.1, 2.1, math.inf, None),
    "repetition_penalty": (0.0, -1.0, 100.5, math.nan, math.inf, None),
    "logit_bias": (
        None,
        [(1, 2.0)],
        {1: 2.0},
        ((1,),),
        ((1, 2.0, 3.0),),
        ((-1, 2.0),),
        ((True, 2.0),),
        (("1", 2.0),),
        ((1.0, 2.0),),
        ((2**31, 2.0),),
        ((1, 100.5),),
        ((1, -100.5),),
        ((1, math.nan),),
        ((1, None),),
        ((1, 2.0), (1, 3.0)),
    ),
    "logprobs": (-1, 21, 1.0, True),
    "seed": (2**63, -(2**63) - 1, 1.5),
    "stop": ("abc", (1,), ("a", ""), None),
    "stop_token_ids": (None, [5], (-1,), (True,), (1.0,), (5,) * (MAX_STOP_TOKEN_IDS + 1)),
    "min_tokens": (-1, None, 1.0),
    "ignore_eos": (1, None),
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values]
)
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)


def test_every_parameter_has_a_refused_value():
    assert set(REFUSED) == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 1e-9),
        ("temperature", 100.0),
        ("top_p", 5e-324),
        ("top_p", 1),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("presence_penalty", -2.0),
        ("presence_penalty", 2),
        ("frequency_penalty", -2),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", 100),
        ("logit_bias", ((0, -100.0), (2**31 - 1, 100))),
        ("logprobs", 0),
        ("logprobs", 20),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("stop_token_ids", (0, 0, 2**31 - 1)),
    ],
)
def test_values_at_the_edge_are_taken(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_more_tokens_at_least_than_at_most_are_refused():
    with pytest.raises(RequestError, match="at most max_tokens, 3") as caught:
        SamplingParams(min_tokens=4, max_tokens=3)
    assert caught.value.param == "min_tokens"
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3


def test_only_what_needs_the_logits_is_not_plain_greedy():
    cuts = SamplingParams(top_k=3, top_p=0.5, min_p=0.1, seed=5, stop=("x",), stop_token_ids=(4,))
    assert SamplingParams().is_plain_greedy
    assert cuts.is_plain_greedy  # the likeliest token is in every cut
    for change in (
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((1, 0.5),)},
        {"min_tokens": 1},
    ):
        params = SamplingParams(**change)
        assert params.changes_logits, change
        assert not params.is_plain_greedy, change
    for change in ({"temperature": 1e-9}, {"logprobs": 0}):
        params = SamplingParams(**change)
        assert not params.changes_logits, change
        assert not params.is_plain_greedy, change


def test_an_event_is_a_token_or_an_error_never_both_or_none():
    event, error = TokenEvent(5, "a", FinishReason.STOP), RequestError("no")
    assert RequestEvent(1, event).event is event
    assert RequestEvent(1, None, error).error is error
    for pair in ((None, None), (event, error)):
        with pytest.raises(AssertionError):
            RequestEvent(1, *pair)
