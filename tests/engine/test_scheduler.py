"""Each rule of the scheduler by an example; the paper device checks every plan besides."""

from dataclasses import FrozenInstanceError

import pytest

from emberbox.engine.plan import Admitted, Arrival, Limits, Plan, Result
from emberbox.engine.scheduler import Scheduler
from emberbox.errors import ContextLengthError
from tests.engine.paper_device import ROOMY, Engine, engine, positions, sizes, tokens


def test_one_request_from_prompt_to_end():
    it = engine(num_snapshots=0)
    request = it.submit(tokens(100), max_tokens=3)
    plan = it.schedule()
    (work,) = plan.work
    assert (work.position, work.slot, work.pages, work.samples) == (0, 0, (0, 1), True)
    assert work.token_ids == tuple(range(100))
    assert plan.admitted == (Admitted(request, 0),)
    it.forward(plan)
    assert it.commit(plan, {request: Result((7,), False)}) == ()
    plan = it.step(token=8)
    assert (plan.work[0].token_ids, plan.work[0].position) == ((7,), 100)
    plan = it.step(token=9)
    assert (plan.work[0].token_ids, plan.work[0].position) == ((8,), 101)
    assert not it.scheduler.has_work
    assert it.schedule() == Plan((), (), (), (), ())
    assert it.scheduler.counts().pages_used == 0


def test_a_plan_is_a_value():
    it = engine()
    it.submit(tokens(3))
    with pytest.raises(FrozenInstanceError):
        it.schedule().work = ()


@pytest.mark.parametrize(
    ("limits", "room"), [({"max_model_len": 200}, 200), ({"num_pages": 3}, 192)]
)
def test_what_can_never_be_held_is_refused_with_both_numbers(limits, room):
    it = engine(**limits)
    it.submit(tokens(room - 8), max_tokens=8)
    with pytest.raises(ContextLengthError, match=rf"{room} tokens.*{room + 1} in all"):
        it.submit(tokens(room - 7), max_tokens=8)
    assert it.scheduler.num_waiting == 1


def test_an_id_is_refused_until_its_request_has_ended():
    scheduler = Scheduler(Limits(**ROOMY))
    arrival = Arrival(request_id=5, token_ids=(1,), key_ids=(1,), max_tokens=1)
    scheduler.submit(arrival)
    with pytest.raises(ValueError, match="request 5"):
        scheduler.submit(arrival)
    plan = scheduler.schedule(lambda request_id, most: ())
    with pytest.raises(ValueError, match="request 5"):
        scheduler.submit(arrival)
    scheduler.commit(plan, {5: Result((2,), True)})
    scheduler.submit(arrival)
    scheduler.abort(5)
    scheduler.submit(arrival)
    assert scheduler.num_waiting == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": (), "key_ids": ()},
        {"key_ids": (1,)},
        {"max_tokens": 0},
        {"num_suffix_tokens": 3},
        {"num_suffix_tokens": -1},
    ],
    ids=str,
)
def test_an_arrival_that_makes_no_sense_is_refused(wrong):
    fits = {"request_id": 0, "token_ids": (1, 2), "key_ids": (1, 2), "max_tokens": 1}
    with pytest.raises(ValueError, match=r"request 0|max_tokens|num_suffix_tokens"):
        Arrival(**(fits | wrong))


@pytest.mark.parametrize("name", [*ROOMY, "snapshot_every", "min_snapshot_tokens"])
def test_limits_nothing_can_run_with_are_refused(name):
    with pytest.raises(ValueError, match=name):
        Limits(**(ROOMY | {name: -1 if name == "num_snapshots" else 0}))


def test_requests_wait_for_a_slot_in_order():
    it = engine(num_slots=2)
    ids = [it.submit(tokens(10, first=i)) for i in range(4)]
    assert [entry.request_id for entry in it.step().admitted] == ids[:2]
    assert it.step(finish={ids[1]}).admitted == ()
    assert [entry.request_id for entry in it.step().admitted] == ids[2:3]
    assert (it.scheduler.num_running, it.scheduler.num_waiting) == (2, 1)


def test_no_later_request_overtakes_one_that_waits_for_pages():
    it = engine(num_pages=4)
    first, big = it.submit(tokens(130)), it.submit(tokens(180, first=500))
    it.submit(tokens(10))
    assert list(sizes(it.step())) == [first]
    assert list(sizes(it.step(finish={first}))) == [first]
    assert list(sizes(it.step())) == [big, big + 1]


def test_pages_promised_to_a_running_prefill_are_not_given_to_another():
    it = engine(num_pages=5, prefill_tokens=64, num_snapshots=0)
    first, second = it.submit(tokens(200)), it.submit(tokens(100))
    assert list(sizes(it.step())) == [first]
    assert it.scheduler.counts().pages_used == 1
    assert it.scheduler.num_waiting == 1
    it.drain()
    assert it.scheduler.counts().num_preemptions == 0
    assert second not in it.asked


def test_decode_goes_on_while_others_prefill_and_share_evenly():
    it = engine(prefill_tokens=100, num_snapshots=0)
    decoding = it.submit(tokens(50), max_tokens=90)
    it.step()
    oldest = it.submit(tokens(400, first=1000))
    others = [it.submit(tokens(400, first=2000)), it.submit(tokens(20, first=3000))]
    assert sizes(it.step()) == {decoding: 1, oldest: 40, others[0]: 40, others[1]: 20}
    assert sizes(it.step()) == {decoding: 1, oldest: 50, others[0]: 50, others[1]: 1}


def test_the_oldest_takes_what_cannot_be_split():
    it = engine(prefill_tokens=100)
    ids = [it.submit(tokens(400, first=1000 * i)) for i in range(3)]
    assert sizes(it.step()) == dict(zip(ids, (34, 33, 33), strict=True))
    it = engine(prefill_tokens=2)
    ids = [it.submit(tokens(400, first=1000 * i)) for i in range(3)]
    assert sizes(it.step()) == {ids[0]: 2}


def test_drafts_are_verified_and_counted():
    it = engine(num_snapshots=0)
    request = it.submit(tokens(60), max_tokens=20)
    it.step()
    asked = []

    def propose(request_id, most):
        asked.append((request_id, most))
        return [11, 12, 13, 14, 15][:most]

    plan = it.step(propose, accept=2, token=5)
    assert asked == [(request, 7)]
    (work,) = plan.work
    assert (work.token_ids, work.num_drafts, work.position) == ((1, 11, 12, 13, 14, 15), 5, 60)
    assert len(work.pages) == 2
    assert it.scheduler.counts().pages_used == 1  # the page for refused drafts is given back
    assert it.asked[request].tokens[-4:] == [1, 11, 12, 5]
    (work,) = it.step(propose, accept=5, token=6).work
    assert (work.token_ids[0], work.position) == (5, 63)


def test_drafts_end_where_the_reply_must():
    it = engine()
    it.submit(tokens(10), max_tokens=5)
    it.step()
    asked = []
    it.step(lambda request_id, most: asked.append(most) or [1] * most, accept=2)
    it.step(lambda request_id, most: asked.append(most) or [1] * most)
    assert asked == [3]  # then one token is left, and no draft could be used


def test_drafts_give_way_when_pages_are_short():
    """Room for three drafts in the page that is there; the only free page is promised."""
    it = engine(num_pages=3, prefill_tokens=40, num_snapshots=0)
    it.submit(tokens(59), max_tokens=50)
    it.step()
    it.step()
    it.step()
    other = it.submit(tokens(100))
    asked = []
    plan = it.step(lambda request_id, most: asked.append(most) or [1] * most)
    assert asked == [3]
    assert (plan.work[0].num_drafts, plan.preempted) == (3, ())
    assert sizes(plan)[other] == 40


def test_snapshots_are_dropped_before_anything_is_refused():
    it = engine(num_pages=6, num_slots=2)
    for i in range(3):
        it.submit(tokens(100, first=1000 * i), max_tokens=20)
        it.drain()
    assert it.scheduler.counts().pages_used > 1
    request = it.submit(tokens(6 * 64 - 1, first=9000), max_tokens=1)
    plan = it.step()
    assert sizes(plan) == {request: 383}
    assert plan.preempted == ()


def crowded(**limits) -> tuple[Engine, list[int]]:
    """Three sequences of two pages each fill the pool, all about to need a third."""
    it = engine(**({"num_pages": 6, "num_slots": 3, "num_snapshots": 0} | limits))
    return it, [it.submit(tokens(128, first=1000 * i), max_tokens=60) for i in range(3)]


def test_the_youngest_is_preempted_and_comes_back_first():
    it, ids = crowded()
    later = it.submit(tokens(10))
    assert it.step().preempted == ()
    plan = it.step()
    assert plan.preempted == (ids[2],)
    assert list(sizes(plan)) == ids[:2]
    assert plan.admitted == ()
    while ids[0] in it.asked:
        plan = it.step()
    assert it.scheduler.counts().num_preemptions == 1  # it was not let in to be preempted again
    plan = it.step()
    assert [entry.request_id for entry in plan.admitted] == [ids[2], later]
    assert sizes(plan)[ids[2]] == 129  # the prompt, and the token that it had already made
    it.drain()


def test_a_preempted_sequence_waits_for_a_page_to_spare():
    """Two pages become free, and it needs two; but the oldest would soon want one of them."""
    it = engine(num_pages=5, num_snapshots=0)
    oldest = it.submit(tokens(128), max_tokens=60)
    small, youngest = it.submit(tokens(10)), it.submit(tokens(100), max_tokens=60)
    it.step()
    assert it.step(finish={small}).preempted == (youngest,)
    assert it.step().admitted == ()
    it.step(finish={oldest})
    assert it.step().admitted == (Admitted(youngest, 0),)


def test_a_younger_prefill_is_preempted_for_an_older_stream():
    it = engine(num_pages=4, prefill_tokens=10, num_snapshots=0)
    first = it.submit(tokens(63), max_tokens=140)
    for _ in range(7):
        it.step()
    second = it.submit(tokens(128), max_tokens=1)
    preempted = []
    while it.asked:
        preempted += it.step().preempted
    assert set(preempted) <= {second}
    assert first not in it.asked


def test_abort_frees_everything_in_any_state():
    it = engine(num_slots=1)
    running, waiting = it.submit(tokens(100)), it.submit(tokens(100))
    it.step()
    it.abort(waiting)
    assert it.scheduler.num_waiting == 0
    it.abort(running)
    assert (it.scheduler.num_running, it.scheduler.has_work) == (0, False)
    it.scheduler.snapshots.clear()
    assert it.scheduler.counts().pages_used == 0
    for request in (running, 77):
        with pytest.raises(KeyError):
            it.scheduler.abort(request)


def test_a_preempted_request_can_be_aborted():
    it, ids = crowded()
    it.step()
    it.step()
    it.abort(ids[2])
    assert (it.scheduler.num_running, it.scheduler.num_waiting) == (2, 0)
    it.drain()


def test_an_abort_before_the_commit_makes_work_and_saves_void():
    it = engine()
    bad, good = it.submit(tokens(100)), it.submit(tokens(100, first=500))
    plan = it.schedule()
    assert len(plan.saves) == 2
    it.abort(bad)
    it.forward(plan)
    it.commit(plan, {good: Result((1,), False)})
    assert positions(it) == [100]
    it.submit(tokens(110))
    assert it.step().admitted[0].num_cached == 0


def test_an_id_asked_anew_before_the_commit_keeps_clear_of_the_old_plan():
    scheduler = Scheduler(Limits(**ROOMY))
    arrival = Arrival(request_id=1, token_ids=(1, 2), key_ids=(1, 2), max_tokens=2)
    scheduler.submit(arrival)
    plan = scheduler.schedule(lambda request_id, most: ())
    scheduler.abort(1)
    scheduler.submit(arrival)
    scheduler.commit(plan, {1: Result((3,), True)})
    (work,) = scheduler.schedule(lambda request_id, most: ()).work
    assert (work.token_ids, work.position) == ((1, 2), 0)


def test_steps_out_of_turn_are_errors():
    it = engine()
    request = it.submit(tokens(5), max_tokens=2)
    plan = it.scheduler.schedule(lambda request_id, most: ())
    with pytest.raises(AssertionError, match="not committed"):
        it.scheduler.schedule(lambda request_id, most: ())
    it.scheduler.commit(plan, {request: Result((1,), False)})
    with pytest.raises(AssertionError, match="scheduled last"):
        it.scheduler.commit(plan, {request: Result((1,), False)})


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (Result((), False), "at least one"),
        (Result((9, 1), False), "first drafts"),
        (Result((4, 1), False), "max_tokens"),
    ],
    ids=["empty", "not a draft", "unfinished at the end"],
)
def test_results_that_cannot_be_are_errors(result, said):
    it = engine()
    request = it.submit(tokens(5), max_tokens=3)
    it.step()
    plan = it.scheduler.schedule(lambda request_id, most: (4,))
    with pytest.raises(AssertionError, match=said):
        it.scheduler.commit(plan, {request: result})


def test_too_many_drafts_are_an_error():
    it = engine()
    it.submit(tokens(5), max_tokens=30)
    it.step()
    with pytest.raises(AssertionError, match="8 drafts, at most 7"):
        it.scheduler.schedule(lambda request_id, most: (4,) * 8)
