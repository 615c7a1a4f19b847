"""Engine, step by step: what it counts, refuses, finds again, and survives."""

import pytest
import torch

from emberbox.engine.core import Engine, limits_of
from emberbox.engine.request import Prompt, SamplingParams
from emberbox.errors import ContextLengthError, NonFiniteLogits, RequestError
from emberbox.testing.coin_drafter import CoinDrafter, oracle_of
from tests.engine.small_engine import (
    WORDS,
    drain,
    engine_of,
    ids,
    left_behind,
    params,
    poison_free,
    run,
    tokens_of,
)
from tests.helpers.nano import nano_llm


def test_stats_count_what_was_done_and_what_is_held():
    engine = engine_of(num_slots=1, num_snapshots=0)
    engine.submit(0, Prompt(ids(70)), params(3))
    engine.submit(1, Prompt(ids(20)), params(2))
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 2)
    assert len(engine.step()) == 1  # 70 tokens of prefill and a first token
    now = engine.stats()
    assert (now.num_running, now.num_waiting) == (1, 1)
    assert (now.pages_used, now.pages_total) == (2, 6)
    assert (now.prompt_tokens, now.generated_tokens, now.steps) == (70, 1, 1)
    drain(engine)
    end = engine.stats()
    assert (end.num_running, end.num_waiting, end.pages_used) == (0, 0, 0)
    assert (end.prompt_tokens, end.cached_tokens, end.generated_tokens) == (90, 0, 5)
    assert (end.steps, end.drafted_tokens, end.num_preemptions) == (5, 0, 0)
    assert engine.step() == []
    assert engine.stats().steps == 5


def test_drafts_are_counted_and_change_only_the_number_of_steps():
    expected = run(engine_of(), ids(40), 12)
    known = {0: expected}
    right = engine_of(CoinDrafter(1.0, 0, oracle_of(known)))
    assert run(right, ids(40), 12) == expected
    stats = right.stats()
    # A token, then 7 + 1, then what is left: 3 tokens of which the last is no draft.
    assert (stats.steps, stats.drafted_tokens, stats.accepted_tokens) == (3, 9, 9)
    wrong = engine_of(CoinDrafter(0.0, 0, oracle_of(known)))
    assert run(wrong, ids(40), 12) == expected
    stats = wrong.stats()
    assert (stats.steps, stats.accepted_tokens) == (12, 0)
    # At most 7, and never so many that the reply would exceed its budget.
    assert stats.drafted_tokens == 7 * 4 + 6 + 5 + 4 + 3 + 2 + 1


def test_the_same_prompt_again_computes_one_token():
    engine = engine_of()
    first = run(engine, ids(64), 4)
    engine.submit(0, Prompt((*ids(64), *first)), params(1))
    (event,) = drain(engine)[0]
    assert event.num_cached == 67  # all but the last token of the reply, which was never computed
    engine.submit(0, Prompt(ids(64)), params(4))
    events = drain(engine)[0]
    assert [event.num_cached for event in events] == [0] * 4  # one token has to be computed
    assert tokens_of(events) == first
    assert engine.stats().cached_tokens == 67


@pytest.mark.parametrize("num_cached", [30, 64, 69, 130, 131])  # odd ones are inside a pool
def test_who_goes_on_from_a_snapshot_has_what_a_cold_request_has(num_cached):
    longer = (*ids(num_cached), *ids(11, first=7))
    warm, cold = engine_of(), engine_of()
    run(warm, ids(num_cached), 1)
    poison_free(warm)
    found = []
    for engine in (warm, cold):
        engine.submit(1, Prompt(longer), params(3))
        while not engine.stats().generated_tokens > (engine is warm):
            events = engine.step()
        found.append(left_behind(engine, 1))
        assert events[0].num_cached == (num_cached if engine is warm else 0)
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        assert torch.isfinite(other).all()
        assert not one.numel() or (one - other).abs().max() <= 1e-4 * other.abs().max()


def test_the_suffix_of_generation_is_not_part_of_the_first_snapshot():
    engine = engine_of()
    engine.submit(0, Prompt(ids(40), num_suffix_tokens=3), params(1))
    drain(engine)
    engine.submit(1, Prompt((*ids(37), *ids(20, first=9))), params(1))
    (event,) = drain(engine)[1]
    assert event.num_cached == 37


def chat(*turns: str, **changes) -> Prompt:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return nano_llm().prepare_chat(messages, **changes)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_second_turn_goes_on_from_the_first(thinking):
    engine = engine_of(num_pages=20, max_model_len=640)
    question = WORDS * 4 + "What is 12 + 7?"
    first = chat(question, enable_thinking=thinking)
    engine.submit(0, first, SamplingParams(max_tokens=60))
    reply = "".join(event.event.text for event in drain(engine)[0]).rpartition("</think>")[2]
    second = chat(question, reply, "And 3 more?", enable_thinking=thinking)
    engine.submit(1, second, params(8))
    events = drain(engine)[1]
    num_first = len(first.token_ids)
    assert num_first > 64
    assert events[0].num_cached >= num_first - first.num_suffix_tokens
    assert tokens_of(events) == run(engine_of(num_pages=20, max_model_len=640), second.token_ids, 8)


def test_a_snapshot_of_the_reply_is_found_by_a_turn_that_repeats_it():
    engine = engine_of()
    reply = run(engine, ids(50), 20)
    engine.submit(1, Prompt((*ids(50), *reply, *ids(10, first=3))), params(1))
    assert drain(engine)[1][0].num_cached == 69


def test_logits_that_are_not_finite_end_one_request_alone():
    expected = {i: run(engine_of(), ids(40, first=i), 9) for i in range(3)}
    engine = engine_of()
    for i in range(3):
        engine.submit(i, Prompt(ids(40, first=i)), params(9))
    events = {i: [] for i in range(3)}
    while engine.has_work:
        if len(events[1]) == 4:
            poison(engine, 1)
        for event in engine.step():
            events[event.request_id].append(event)
    assert [len(events[i]) for i in range(3)] == [9, 5, 9]
    assert isinstance(events[1][-1].error, NonFiniteLogits)
    assert tokens_of(events[1][:-1]) == expected[1][:4]
    assert tokens_of(events[0]) == expected[0] and tokens_of(events[2]) == expected[2]
    engine.scheduler.snapshots.clear()
    assert engine.stats().pages_used == 0
    assert [run(engine, ids(40, first=i), 9) for i in range(3)] == list(expected.values())


def poison(engine: Engine, request_id: int) -> None:
    slot = engine.scheduler._sequences[request_id].slot
    engine.runner.cache.state[:, slot] = float("nan")


def test_a_request_that_fails_under_verification_leaves_its_slot_free():
    expected = run(engine_of(), ids(40), 9)
    engine = engine_of(CoinDrafter(1.0, 0, oracle_of({0: expected})), num_slots=1)
    engine.submit(0, Prompt(ids(40)), params(9))
    engine.step()
    poison(engine, 0)
    (event,) = engine.step()
    assert isinstance(event.error, NonFiniteLogits)
    assert not engine.has_work
    assert not engine.runner.cache.is_waiting(0)
    assert run(engine, ids(40), 9) == expected


def test_a_request_that_fails_leaves_nothing_to_be_found():
    engine = engine_of(num_slots=1)
    engine.submit(0, Prompt(ids(64)), params(4))
    weight = nano_llm().network.norm.weight
    kept = weight.clone()
    try:
        weight.fill_(float("nan"))
        (event,) = drain(engine)[0]
    finally:
        weight.copy_(kept)
    assert isinstance(event.error, NonFiniteLogits)
    assert (engine.stats().snapshots_used, engine.stats().pages_used) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "asked", "message"),
    [
        (ids(250), params(7), r"holds 256 tokens; the prompt has 250 and .* 7, 257 in all"),
        (ids(256), SamplingParams(), r"holds 256 tokens; the prompt has 256 and .* 1, 257 in all"),
        ((), params(1), "the prompt holds no tokens"),
        ((5, 4096, 7), params(1), "token 4096 at position 1 is outside the vocabulary of 4096"),
        ((5, 6, -1), params(1), "token -1 at position 2 is outside the vocabulary of 4096"),
        ((5,), params(1, logit_bias=((4096, 1.0),)), "logit_bias: token 4096 .* of 4096"),
        ((5,), params(1, stop_token_ids=(7, 5000)), "stop_token_ids: token 5000 .* of 4096"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_its_numbers(prompt, asked, message):
    engine = engine_of()
    for refuse in (engine.check, lambda *request: engine.submit(0, *request)):
        with pytest.raises(RequestError, match=message) as caught:
            refuse(Prompt(prompt), asked)
        assert isinstance(caught.value, ContextLengthError) == ("in all" in message)
    assert not engine.has_work
    assert run(engine, ids(20), 1)  # the number 0 was not taken


def test_the_budget_is_what_was_asked_or_all_the_room_there_is():
    engine = engine_of()
    assert engine.check(Prompt(ids(250)), SamplingParams()) == 6
    assert engine.check(Prompt(ids(250)), params(6)) == 6
    assert engine.check(Prompt(ids(10)), params(3)) == 3


def test_limits_follow_from_the_plan_of_memory():
    memory = nano_llm().memory
    limits = limits_of(memory)
    assert (limits.num_pages, limits.num_slots, limits.num_snapshots) == (
        memory.num_pages,
        memory.num_slots,
        memory.num_snapshots,
    )
    assert (limits.prefill_tokens, limits.max_model_len) == (512, 16_384)
    assert (limits.snapshot_every, limits.min_snapshot_tokens) == (4096, 64)


def test_an_id_in_use_is_refused_and_is_free_again_after_the_end():
    engine = engine_of()
    engine.submit(4, Prompt(ids(20)), params(3))
    with pytest.raises(ValueError, match="request 4 is already here"):
        engine.submit(4, Prompt(ids(30)), params(3))
    expected = tokens_of(drain(engine)[4])
    assert expected == run(engine_of(), ids(20), 3)
    engine.submit(4, Prompt(ids(20)), params(3))
    assert tokens_of(drain(engine)[4]) == expected


def test_an_abort_gives_no_event_and_frees_everything():
    engine = engine_of(num_slots=2)
    for i in range(3):
        engine.submit(i, Prompt(ids(70, first=i)), params(5))
    engine.step()
    engine.abort(99)  # unknown
    engine.abort(2)  # waits
    engine.abort(0)  # runs
    engine.abort(0)  # has ended
    events = drain(engine)
    assert set(events) == {1}
    assert tokens_of(events[1]) == run(engine_of(), ids(70, first=1), 5)
    engine.abort(1)
    engine.scheduler.snapshots.clear()
    assert engine.stats().pages_used == 0
