"""Sampling follows its distribution, keeps its limits and its seed; penalties by hand."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberbox.engine.request import SamplingParams
from emberbox.engine.sampler import Sampler, draw, uniform_of
from emberbox.ops.sample_rows import OP
from tests.helpers.gpu import gpu_or_skip

LOGITS = torch.tensor([-1.0, 2.0, 0.5, -30.0, 1.0, 0.0, 1.5, -0.5])
NUM_DRAWS = 4000
PINNED_UNIFORMS = [0.011546754286331562, 0.0828426870273763, 0.2735225580154991]
# chi-square that a true distribution exceeds once in ten thousand, by degrees of freedom
CRITICAL = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9}


def draws(params: SamplingParams, n: int, logits: torch.Tensor = LOGITS) -> list[int]:
    sampler = Sampler(params)
    return [sampler.sample(logits, int(logits.argmax()))[0] for _ in range(n)]


def exact_shares(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The distribution by the definitions, in plain Python: token -> probability, kept only."""
    top = max(logits)
    weights = {i: math.exp((x - top) / params.temperature) for i, x in enumerate(logits)}
    ranking = sorted(weights, key=lambda i: (-weights[i], i))
    ranking = ranking[: params.top_k or None]
    total, before, kept = sum(weights[i] for i in ranking), 0.0, []
    for token in ranking:
        if not kept or before / total < params.top_p:
            kept.append(token)
        before += weights[token]
    kept = [i for i in kept if weights[i] >= params.min_p]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.9, "min_p": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [7, -7])
def test_draws_follow_the_exact_distribution(options, seed):
    params = SamplingParams(seed=seed, **options)
    shares = exact_shares(LOGITS.tolist(), params)
    tokens = draws(params, NUM_DRAWS)
    assert set(tokens) <= set(shares)
    expected = {i: NUM_DRAWS * share for i, share in shares.items() if NUM_DRAWS * share > 5}
    chi_square = sum((tokens.count(i) - e) ** 2 / e for i, e in expected.items())
    assert chi_square < CRITICAL[len(expected) - 1]


params_that_cut = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-9, 0.3, 1.0, 5.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.31, 1.0]),
)


@given(
    # Halves, so that there are many ties but no near-ties that rounding could tip.
    st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=10),
    params_that_cut,
    st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_the_inverse_cdf_and_never_outside_the_cuts(logits, params, uniform):
    shares = exact_shares(logits, params)
    token = draw(torch.tensor(logits, dtype=torch.float64), params, uniform)
    assert token in shares
    before = sum(share for i, share in list(shares.items())[: list(shares).index(token)])
    assert before - 1e-12 <= uniform <= before + shares[token] + 1e-12


def test_top_p_keeps_the_token_that_crosses():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])  # shares 0.644, 0.237, 0.087, 0.032
    for top_p, kept in ((1e-9, {0}), (0.64, {0}), (0.7, {0, 1}), (0.9, {0, 1, 2})):
        params = SamplingParams(temperature=1.0, top_p=top_p, seed=1)
        assert set(draws(params, 400, logits)) == kept


def test_min_p_is_a_share_of_the_likeliest_tokens_probability():
    logits = torch.tensor([0.0, math.log(0.3), math.log(0.2)])
    for min_p, kept in ((0.19, {0, 1, 2}), (0.21, {0, 1}), (0.299, {0, 1}), (0.301, {0}), (1, {0})):
        params = SamplingParams(temperature=1.0, min_p=min_p, seed=1)
        assert set(draws(params, 100, logits)) == kept


def test_a_share_holds_its_lower_border_and_not_its_upper():
    scores, params = torch.zeros(4, dtype=torch.float64), SamplingParams(temperature=1.0)
    for i in range(4):
        assert draw(scores, params, i / 4) == i
        assert draw(scores, params, (i + 1) / 4 - 2**-53) == i


def test_the_callers_logits_stay_as_they_are():
    logits = LOGITS.double()
    params = SamplingParams(
        temperature=1.0, logit_bias=((1, -5.0),), presence_penalty=1.0, min_tokens=9, seed=1
    )
    assert len(draws(params, 5, logits)) == 5
    assert torch.equal(logits, LOGITS.double())


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_without_weight_is_never_drawn(uniform):
    scores = torch.tensor([-math.inf, -2000.0, 0.0, 0.0, -math.inf], dtype=torch.float64)
    assert draw(scores, SamplingParams(temperature=1.0), uniform) in (2, 3)


def test_uniforms_depend_on_seed_and_index_alone_and_never_change():
    # Pinned: a reply with a seed must repeat under the next release too.
    assert [uniform_of(0, 0), uniform_of(7, 1), uniform_of(-1, 123456)] == PINNED_UNIFORMS
    grid = [uniform_of(seed, i) for seed in range(40) for i in range(100)]
    assert len(set(grid)) == len(grid)
    assert uniform_of(3, 5) == grid[3 * 100 + 5]


def test_uniforms_are_uniform_over_indices_and_over_seeds():
    for numbers in (
        [uniform_of(11, i) for i in range(NUM_DRAWS)],
        [uniform_of(seed, 3) for seed in range(NUM_DRAWS)],
    ):
        counts = [sum(1 for u in numbers if int(u * 8) == part) for part in range(8)]
        chi_square = sum((n - NUM_DRAWS / 8) ** 2 / (NUM_DRAWS / 8) for n in counts)
        assert chi_square < CRITICAL[7]
        rising = sum(a < b for a, b in itertools.pairwise(numbers))
        assert abs(rising - NUM_DRAWS / 2) < 4 * math.sqrt(NUM_DRAWS / 12)


def test_a_seed_repeats_and_another_differs():
    first = draws(SamplingParams(temperature=1.0, seed=3), 50)
    assert first == draws(SamplingParams(temperature=1.0, seed=3), 50)
    assert first != draws(SamplingParams(temperature=1.0, seed=4), 50)


def test_without_a_seed_two_replies_differ_and_a_copy_does_not():
    one, other = (Sampler(SamplingParams(temperature=5.0)) for _ in range(2))
    twin = one.copy()
    rows = [[sampler.sample(LOGITS, 1)[0] for _ in range(50)] for sampler in (one, other, twin)]
    assert rows[0] != rows[1]
    assert rows[0] == rows[2]


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    assert set(draws(SamplingParams(temperature=5e-324, seed=0), 20)) == {1}
    params = SamplingParams(temperature=1e-300, repetition_penalty=5e-324, seed=0)
    sampler = Sampler(params, range(8))
    assert sampler.scores(LOGITS * 1e37).isfinite().all()
    assert sampler.sample(LOGITS * 1e37, 1)[0] == 1


def test_repetition_penalty_divides_what_is_above_zero_and_multiplies_what_is_below():
    sampler = Sampler(SamplingParams(repetition_penalty=2.0, temperature=1.0), [0, 1, 1, 5])
    # prompt tokens 0, 1, 5, whatever their number; then token 4 from the reply
    expected = [-2.0, 1.0, 0.5, -30.0, 1.0, 0.0, 1.5, -0.5]
    assert sampler.scores(LOGITS).tolist() == expected
    forced = torch.full((8,), -1000.0)
    forced[4] = 1000.0
    assert sampler.sample(forced, 4)[0] == 4
    expected[4] = 0.5
    assert sampler.scores(LOGITS).tolist() == expected
    assert LOGITS.tolist() == [-1.0, 2.0, 0.5, -30.0, 1.0, 0.0, 1.5, -0.5]


def test_presence_counts_once_and_frequency_every_time_in_the_reply_alone():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, temperature=1.0)
    sampler = Sampler(params, [0, 1, 2])
    assert sampler.scores(LOGITS).tolist() == LOGITS.tolist()
    for token in (6, 2, 6, 6):
        forced = torch.full((8,), -1000.0)
        forced[token] = 1000.0
        assert sampler.sample(forced, token)[0] == token
    # token 6: 1.5 - 0.5 - 3 * 0.25; token 2: 0.5 - 0.5 - 0.25
    expected = [-1.0, 2.0, -0.25, -30.0, 1.0, 0.0, 0.25, -0.5]
    assert sampler.scores(LOGITS).tolist() == expected
    # Below zero they reward.
    sampler.params = SamplingParams(presence_penalty=-2.0, temperature=1.0)
    assert sampler.scores(LOGITS).tolist()[6] == 3.5


def test_penalties_apply_in_the_fields_order():
    params = SamplingParams(
        logit_bias=((6, -2.0), (4, 1.0)), repetition_penalty=2.0, presence_penalty=1.0
    )
    sampler = Sampler(params, [6])
    assert sampler.sample(LOGITS, 1)[0] == 1  # 2.0; token 4 has 1.0 + 1.0 and comes later
    # token 6: (1.5 - 2) * 2; token 1: 2 / 2 - 1; token 4: 1 + 1
    assert sampler.scores(LOGITS).tolist() == [-1.0, 0.0, 0.5, -30.0, 2.0, 0.0, -1.0, -0.5]
    assert sampler.sample(LOGITS, 1)[0] == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_forces_and_bans(temperature):
    forced = SamplingParams(temperature=temperature, seed=2, logit_bias=((3, 100.0),))
    assert set(draws(forced, 50)) == {3}
    banned = SamplingParams(temperature=temperature, seed=2, logit_bias=((1, -100), (6, -100)))
    assert not set(draws(banned, 200)) & {1, 6}


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_end_tokens_are_banned_until_min_tokens(temperature):
    params = SamplingParams(
        temperature=temperature, min_tokens=20, seed=1, logit_bias=((1, 100.0),)
    )
    sampler = Sampler(params, stop_ids=(1, 6))
    tokens = [sampler.sample(LOGITS, 1)[0] for _ in range(21)]
    assert not set(tokens[:20]) & {1, 6}
    assert tokens[20] == 1


def test_logprobs_are_those_of_the_raw_logits():
    params = SamplingParams(
        temperature=3.0, top_k=2, logprobs=3, repetition_penalty=3.0, logit_bias=((5, 100.0),)
    )
    token, logprobs = Sampler(params, [1]).sample(LOGITS, 1)
    expected = torch.log_softmax(LOGITS.double(), -1)
    assert token == logprobs.chosen.token_id == 5
    assert logprobs.chosen.logprob == pytest.approx(float(expected[5]), abs=1e-12)
    assert [entry.token_id for entry in logprobs.top] == [1, 6, 4]
    for entry in logprobs.top:
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-12)


def test_logprobs_of_the_whole_vocabulary_sum_to_one():
    _, logprobs = Sampler(SamplingParams(logprobs=20)).sample(LOGITS, 1)
    assert sorted(entry.token_id for entry in logprobs.top) == list(range(8))
    assert sum(math.exp(entry.logprob) for entry in logprobs.top) == pytest.approx(1, abs=1e-12)


def test_logprobs_none_zero_and_ties():
    tied = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert Sampler(SamplingParams(temperature=1.0)).sample(tied, 1)[1] is None
    token, logprobs = Sampler(SamplingParams(logprobs=0)).sample(tied, 2)
    assert (token, logprobs.chosen.token_id, logprobs.top) == (2, 2, ())  # greedy is the caller's
    _, logprobs = Sampler(SamplingParams(logprobs=2)).sample(tied, 2)
    assert [entry.token_id for entry in logprobs.top] == [1, 2]


def test_a_copy_counts_for_itself():
    params = SamplingParams(frequency_penalty=2.0, repetition_penalty=1.5)
    sampler = Sampler(params, [0])
    sampler.sample(LOGITS, 1)
    twin, before = sampler.copy(), sampler.scores(LOGITS).tolist()
    assert twin.scores(LOGITS).tolist() == before
    for _ in range(5):
        sampler.sample(LOGITS, 1)
    assert twin.scores(LOGITS).tolist() == before
    assert (twin.num_tokens, sampler.num_tokens) == (1, 6)


def test_the_plain_form_is_what_a_sampler_draws_with():
    params = SamplingParams(
        temperature=0.9, top_p=0.9, seed=5, presence_penalty=0.1, repetition_penalty=1.1
    )
    sampler, generator = Sampler(params, range(40)), torch.Generator().manual_seed(1)
    for i in range(60):
        logits = 2 * torch.randn(500, generator=generator)
        expected = draw(sampler.scores(logits), params, uniform_of(5, i))
        assert sampler.sample(logits, 0)[0] == expected


EVERY_CHANGE = {
    "logit_bias": ((3, 5.0), (154_000, 40.0), (0, -100.0)),
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "min_tokens": 12,
}


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, EVERY_CHANGE], ids=["plain", "changed"])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01}],
    ids=str,
)
def test_a_gpu_draws_what_a_cpu_draws(changes, options):
    device = gpu_or_skip()
    params = SamplingParams(seed=11, **options, **changes)
    ops = (OP.reference, OP.load("cuda"))
    here, there = (Sampler(params, range(1000), (7, 154_000), op) for op in ops)
    generator = torch.Generator().manual_seed(3)
    for _ in range(25):
        logits = 3 * torch.randn(154_880, generator=generator)
        logits[:20] += 6
        greedy = int(logits.argmax())
        expected = here.sample(logits, greedy)
        assert there.sample(logits.to(device), greedy) == expected
