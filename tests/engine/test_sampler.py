"""Sampling follows its distribution, keeps its limits and its seed."""

import math

import pytest
import torch

from emberbox.engine.request import SamplingParams
from emberbox.engine.sampler import Sampler
from emberbox.errors import NonFiniteLogits, RequestError

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])


def draws(params: SamplingParams, n: int = 4000) -> list[int]:
    sampler = Sampler(params)
    return [sampler.sample(LOGITS) for _ in range(n)]


def test_greedy_takes_the_largest():
    assert set(draws(SamplingParams(), 5)) == {0}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_distribution(temperature):
    counts = torch.bincount(
        torch.tensor(draws(SamplingParams(temperature=temperature, seed=7))), minlength=5
    )
    expected = torch.softmax(LOGITS.double() / temperature, -1) * 4000
    kept = expected > 5
    chi_square = ((counts - expected).square() / expected)[kept].sum()
    assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001


def test_top_p_never_leaves_its_set_and_keeps_the_token_that_crosses():
    # shares 0.644, 0.237, 0.087, 0.032: 0.7 needs two tokens
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.7, seed=1))) == {0, 1}
    assert set(draws(SamplingParams(temperature=1.0, top_p=1e-9, seed=1))) == {0}


def test_top_k_never_leaves_its_set():
    assert set(draws(SamplingParams(temperature=5.0, top_k=3, seed=1))) == {0, 1, 2}


def test_a_seed_repeats_and_another_differs():
    first = draws(SamplingParams(temperature=1.0, seed=3), 50)
    assert first == draws(SamplingParams(temperature=1.0, seed=3), 50)
    assert first != draws(SamplingParams(temperature=1.0, seed=4), 50)


def test_a_tiny_temperature_does_not_overflow():
    assert set(draws(SamplingParams(temperature=1e-9, seed=0), 20)) == {0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("stop", ("a", "")),
        ("seed", 2**63),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("top_k", 1.5),
        ("top_k", None),
        ("seed", 1.5),
        ("temperature", "1"),
        ("top_p", None),
        ("stop", "abc"),
        ("stop", (1,)),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_token_is_chosen_from_logits_that_are_not_finite(temperature, value):
    logits = LOGITS.clone()
    logits[3] = value
    with pytest.raises(NonFiniteLogits):
        Sampler(SamplingParams(temperature=temperature)).sample(logits)
