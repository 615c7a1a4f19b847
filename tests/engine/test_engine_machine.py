"""Whatever happens to an engine, each reply is what the request gives alone.

`make soak` runs thousands of schedules; here are a hundred with fixed seeds, and their counters,
which must show that they really did what they are for.
"""

from dataclasses import replace
from itertools import combinations

import pytest

from emberbox.engine.runner import ModelRunner
from tests.engine.cold_runs import ColdRuns
from tests.engine.engine_schedules import SCHEDULES_PER_WORLD, Difference, Schedule, run_schedules
from tests.engine.engine_world import World
from tests.helpers.nano import nano_llm

# Of one world's schedules together; about half of what they do.
AT_LEAST = {
    "finished": 150,
    "preemptions": 20,
    "preemptions with pictures": 8,
    "evictions": 200,
    "hits": 20,
    "cached in part of a page": 12,
    "next turns": 7,
    "pictures": 35,
    "pictures reused": 3,
    "sampled": 20,
    "ended by stop": 3,
    "accepted drafts": 200,
    "rejected drafts": 1000,
    "aborted while running": 14,
    "aborted while waiting": 7,
    "aborted after preemption": 3,
}
FIXED_SCHEDULES = 12
AT_LEAST_FIXED = {"finished": 40, "preemptions": 8, "accepted drafts": 25, "rejected drafts": 100}


@pytest.mark.timeout(900)  # a minute on a core of its own
@pytest.mark.parametrize("world", [0, 1])
def test_replies_equal_those_of_the_request_alone(world):
    counters = run_schedules(world * SCHEDULES_PER_WORLD, SCHEDULES_PER_WORLD)
    assert counters["near-ties"] == 0
    few = {name: counters[name] for name, least in AT_LEAST.items() if counters[name] < least}
    assert not few, f"schedules that do little: {few}, wanted {AT_LEAST}"
    assert counters["schedules"] == SCHEDULES_PER_WORLD
    ended = ("finished", "aborted while running", "aborted while waiting")
    assert counters["submitted"] == sum(counters[name] for name in ended)


@pytest.mark.timeout(600)
def test_replies_are_the_same_by_steps_of_fixed_shape(monkeypatch):
    """The steps that a GPU captures, called one after another on the CPU."""
    made = ModelRunner.__init__

    def with_shapes(runner, network, memory):
        made(runner, network, memory, fixed_shapes=True)

    monkeypatch.setattr(ModelRunner, "__init__", with_shapes)
    counters = run_schedules(0, FIXED_SCHEDULES)
    assert counters["near-ties"] == 0
    few = {name: counters[name] for name, least in AT_LEAST_FIXED.items() if counters[name] < least}
    assert not few, f"schedules that do little: {few}, wanted {AT_LEAST_FIXED}"


def test_a_wrong_token_is_a_difference_that_names_its_seed(monkeypatch):
    colds = ColdRuns(nano_llm())
    right = colds.of
    monkeypatch.setattr(colds, "of", lambda ask: wrong(right(ask)))
    with pytest.raises(Difference, match=r"schedule 7: AssertionError.*\n.* --first 7 "):
        Schedule(7, colds).run()


def wrong(cold):
    """Another last token, far from a tie."""
    return replace(cold, tokens=(*cold.tokens[:-1], cold.tokens[-1] ^ 1))


def test_a_world_has_pictures_that_are_told_apart_and_prompts_that_share():
    colds = ColdRuns(nano_llm())
    families = World(0, nano_llm()).families
    for family in families:
        assert len({ask.prompt.token_ids[:40] for ask in family}) < len(family)
        assert max(len(ask.prompt.token_ids) for ask in family) <= 166
    pairs = [
        (one, other)
        for one, other in combinations(families[-1][:4], 2)
        if one.prompt.token_ids == other.prompt.token_ids
    ]
    assert pairs
    assert any(colds.of(one).tokens != colds.of(other).tokens for one, other in pairs)
