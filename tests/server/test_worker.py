"""The engine thread by itself: one hop per step, aborts before the next step, ends."""

import asyncio
import contextlib
import threading

import pytest

from emberbox.engine.request import FinishReason, Prompt, RequestEvent, SamplingParams, TokenEvent
from emberbox.errors import ContextLengthError
from emberbox.server.failures import EngineStopped, TooManyWaiting
from emberbox.server.worker import Delivery, EngineWorker, Ticket
from tests.server.scripted import ScriptedEngine

PROMPT, PARAMS = Prompt((1, 2)), SamplingParams()


async def collect(ticket: Ticket) -> list[Delivery]:
    """Every delivery, to the end of every choice."""
    taken: list[Delivery] = []
    while sum(one.is_last for one in taken) < len(ticket.request_ids):
        taken += await asyncio.wait_for(ticket.take(), 10)
    return taken


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the hops of other threads into it."""

    num_hops = 0

    def call_soon_threadsafe(self, callback, *args, context=None):
        self.num_hops += threading.current_thread().name == "emberbox-engine"
        return super().call_soon_threadsafe(callback, *args, context=context)


def test_a_step_is_one_hop_however_many_requests_it_served():
    engine = ScriptedEngine(["a", "b", "c"])
    engine.is_gated = True
    loop = CountingLoop()

    async def run(worker: EngineWorker) -> list[list[Delivery]]:
        tickets = [worker.submit([(PROMPT, PARAMS)] * 2) for _ in range(4)]
        engine.gate.release(100)
        return [await collect(ticket) for ticket in tickets]

    with contextlib.closing(loop), EngineWorker(engine, max_waiting=64) as worker:
        taken = loop.run_until_complete(run(worker))
    assert [len(deliveries) for deliveries in taken] == [6] * 4
    # Eight replies of three tokens; the first step may begin before all have come.
    assert loop.num_hops == engine.num_steps <= 3 + 3
    texts = [[d.event.text for d in taken[0] if d.index == i] for i in range(2)]
    assert texts == [["a", "b", "c"]] * 2


def test_requests_of_several_loops_come_back_each_to_its_own():
    engine = ScriptedEngine(["a", "b"])

    def ask(worker: EngineWorker, found: list[str]) -> None:
        async def run() -> None:
            taken = await collect(worker.submit([(PROMPT, PARAMS)]))
            found.extend(delivery.event.text for delivery in taken)

        asyncio.run(run())

    with EngineWorker(engine, max_waiting=64) as worker:
        found: list[list[str]] = [[] for _ in range(5)]
        threads = [threading.Thread(target=ask, args=(worker, one)) for one in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert found == [["a", "b"]] * 5


def test_an_abort_reaches_the_engine_before_the_next_step_and_gives_no_event():
    engine = ScriptedEngine(["x"] * 50)
    engine.is_gated = True

    async def run(worker: EngineWorker) -> None:
        leaving, staying = worker.submit([(PROMPT, PARAMS)] * 2), worker.submit([(PROMPT, PARAMS)])
        engine.gate.release(2)  # the first step may begin before all have come
        await asyncio.wait_for(staying.take(), 10)
        leaving.cancel()
        num_arrived = len(leaving._arrived)
        leaving.cancel()  # once is enough
        engine.gate.release(100)
        await collect(staying)
        assert len(leaving._arrived) == num_arrived

    with EngineWorker(engine, max_waiting=64) as worker:
        asyncio.run(run(worker))
        assert sorted(engine.aborted) == [0, 1]
        assert worker.num_cancelled == 1
        # The step under way when they left may still have served them, none after it.
        assert engine.num_generated <= 50 + 2 * 3


def test_a_cancel_after_the_end_is_no_abort():
    engine = ScriptedEngine()

    async def run(worker: EngineWorker) -> None:
        ticket = worker.submit([(PROMPT, PARAMS)])
        await collect(ticket)
        ticket.cancel()

    with EngineWorker(engine, max_waiting=64) as worker:
        asyncio.run(run(worker))
    assert (engine.aborted, worker.num_cancelled) == ([], 0)


def test_what_the_engine_refuses_at_the_door_ends_that_request_alone():
    class Choosy(ScriptedEngine):
        def submit(self, request_id, prompt, params):
            if len(prompt.token_ids) > 5:
                raise ContextLengthError("6 tokens are more than all pages hold")
            super().submit(request_id, prompt, params)

    async def run(worker: EngineWorker) -> list[Delivery]:
        return await collect(worker.submit([(Prompt((1,) * 6), PARAMS), (PROMPT, PARAMS)]))

    with EngineWorker(Choosy(["a"]), max_waiting=64) as worker:
        taken = asyncio.run(run(worker))
        assert worker.is_alive
    by_index = {delivery.index: delivery.event for delivery in taken}
    assert isinstance(by_index[0], ContextLengthError)
    assert by_index[1].finish is FinishReason.STOP


def test_an_event_for_nobody_is_logged_and_harms_nobody(caplog):
    class Talkative(ScriptedEngine):
        def step(self):
            return [RequestEvent(999, TokenEvent(1, "x")), *super().step()]

    async def run(worker: EngineWorker) -> list[Delivery]:
        return await collect(worker.submit([(PROMPT, PARAMS)]))

    with EngineWorker(Talkative(["a", "b"]), max_waiting=64) as worker:
        assert len(asyncio.run(run(worker))) == 2
    assert "request 999" in caplog.text


def test_an_idle_engine_is_never_stepped_and_close_is_prompt():
    engine = ScriptedEngine()
    worker = EngineWorker(engine, max_waiting=4)
    worker.close()
    assert (worker.is_alive, engine.num_steps) == (False, 0)
    worker.close()  # once more does no harm


def test_closing_fails_what_is_open_and_refuses_what_comes():
    engine = ScriptedEngine(["x"] * 50)
    engine.is_gated = True

    async def run(worker: EngineWorker) -> list[Delivery]:
        ticket = worker.submit([(PROMPT, PARAMS)])
        engine.gate.release(1)
        first = await asyncio.wait_for(ticket.take(), 10)
        closing = asyncio.create_task(asyncio.to_thread(worker.close))
        while worker.is_alive:
            await asyncio.sleep(0.01)
        engine.gate.release(1)  # the step that was under way
        await closing
        with pytest.raises(EngineStopped):
            worker.submit([(PROMPT, PARAMS)])
        return first + await collect(ticket)

    worker = EngineWorker(engine, max_waiting=64)
    taken = asyncio.run(run(worker))
    assert isinstance(taken[-1].event, EngineStopped)
    assert engine.num_steps <= 2
    assert worker.num_open == 0


def test_a_full_queue_refuses_but_what_runs_does_not_count_as_waiting():
    engine = ScriptedEngine(["x"] * 50, num_slots=2)
    engine.is_gated = True

    async def run(worker: EngineWorker) -> None:
        tickets = [worker.submit([(PROMPT, PARAMS)]) for _ in range(2)]
        with pytest.raises(TooManyWaiting, match="2 requests wait"):
            worker.submit([(PROMPT, PARAMS)])
        while worker.stats.num_running < 2:
            engine.gate.release(1)
            await asyncio.sleep(0.01)
        tickets += [worker.submit([(PROMPT, PARAMS)]) for _ in range(2)]
        with pytest.raises(TooManyWaiting):
            worker.submit([(PROMPT, PARAMS)])
        engine.gate.release(100)
        for ticket in tickets:
            while (await ticket.take())[-1].event.finish is None:
                pass

    with EngineWorker(engine, max_waiting=2) as worker:
        asyncio.run(run(worker))
        assert worker.stats.num_running == worker.num_open == 0


def test_every_choice_counts_where_others_wait():
    engine = ScriptedEngine(["x"], num_slots=1)
    engine.is_gated = True

    async def run(worker: EngineWorker) -> None:
        # Nobody waits: later it would fit no better.
        first = worker.submit([(PROMPT, PARAMS)] * 3)
        with pytest.raises(TooManyWaiting, match="3 requests wait and 2 more came, the limit is 4"):
            worker.submit([(PROMPT, PARAMS)] * 2)
        last = worker.submit([(PROMPT, PARAMS)])
        with pytest.raises(TooManyWaiting):
            worker.check_room()
        engine.gate.release(100)
        assert len(await collect(first)) == 3
        assert len(await collect(last)) == 1

    with EngineWorker(engine, max_waiting=4) as worker:
        asyncio.run(run(worker))


def test_a_loop_that_has_closed_does_not_hurt_the_engine():
    engine = ScriptedEngine(["x"] * 3)
    engine.is_gated = True

    async def leave(worker: EngineWorker) -> None:
        worker.submit([(PROMPT, PARAMS)])

    async def run(worker: EngineWorker) -> list[Delivery]:
        ticket = worker.submit([(PROMPT, PARAMS)])
        engine.gate.release(100)
        return await collect(ticket)

    with EngineWorker(engine, max_waiting=64) as worker:
        asyncio.run(leave(worker))
        assert len(asyncio.run(run(worker))) == 3
