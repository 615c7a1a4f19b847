"""The engine thread: takes requests and aborts from one queue, steps, and delivers what came.

A request enters through `submit` and comes back on the caller's event loop: one hop in, and per
step one hop out for all requests of that loop. A request that nobody waits for any more is aborted
before the next step. Knows no HTTP.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from emberbox.engine.request import EngineStats, Prompt, RequestEvent, SamplingParams, TokenEvent
from emberbox.server.failures import EngineStopped, TooManyWaiting

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What the server needs of an engine; `emberbox.LLM` is one.

    `submit`, `abort`, `step`, `stats` and `has_work` belong to the engine thread; the rest may be
    called from any. A request's last event carries a finish reason or an error; an abort gives no
    event. What `step` raises ends the engine.
    """

    @property
    def model_id(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        reasoning_effort: str | None = None,
        enable_thinking: bool | None = None,
        clear_thinking: bool | None = None,
    ) -> Prompt: ...

    def prepare(self, prompt: str | Sequence[int]) -> Prompt: ...

    def check(self, prompt: Prompt, params: SamplingParams) -> int: ...

    def starts_in_reasoning(self, prompt: Prompt) -> bool: ...

    def token_text(self, token_id: int) -> tuple[str, bytes]: ...

    def reply_bytes(self, token_id: int) -> bytes: ...

    def submit(self, request_id: int, prompt: Prompt, params: SamplingParams) -> None: ...

    def abort(self, request_id: int) -> None: ...

    def step(self) -> list[RequestEvent]: ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class Delivery:
    """What came for choice `index` of a ticket: an event, or what ended it early."""

    index: int
    event: TokenEvent | Exception
    num_cached: int = 0

    @property
    def is_last(self) -> bool:
        """Whether nothing more comes for this choice."""
        return isinstance(self.event, Exception) or self.event.finish is not None


class Ticket:
    """The choices of one HTTP request, each a request of the engine. Lives on one event loop."""

    def __init__(self, worker: "EngineWorker", request_ids: range) -> None:
        self.request_ids = request_ids
        self.loop = asyncio.get_running_loop()
        self.is_cancelled = False
        self._worker = worker
        self._num_left = len(request_ids)
        self._arrived: list[Delivery] = []
        self._has_arrived = asyncio.Event()

    async def take(self) -> list[Delivery]:
        """All that has come since the last call; waits for something. Cancelling loses nothing."""
        await self._has_arrived.wait()
        self._has_arrived.clear()
        taken, self._arrived = self._arrived, []
        return taken

    def cancel(self) -> None:
        """Abort what still runs; nothing further is delivered."""
        if self._num_left and not self.is_cancelled:
            self.is_cancelled = True
            self._worker.abort(self)

    def put(self, delivery: Delivery) -> None:
        """On the ticket's loop."""
        if not self.is_cancelled:
            self._num_left -= delivery.is_last
            self._arrived.append(delivery)
            self._has_arrived.set()


@dataclass(frozen=True, slots=True)
class _Submit:
    ticket: Ticket
    requests: tuple[tuple[Prompt, SamplingParams], ...]


@dataclass(frozen=True, slots=True)
class _Abort:
    ticket: Ticket


@dataclass(slots=True)
class _Outbox:
    """The deliveries of one step, per event loop."""

    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Delivery]]] = field(
        default_factory=dict
    )

    def add(self, ticket: Ticket, delivery: Delivery) -> None:
        self.by_loop.setdefault(ticket.loop, []).append((ticket, delivery))

    def send(self) -> None:
        """One hop per loop. A loop that has closed has nobody left to tell."""
        for loop, deliveries in self.by_loop.items():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_put_all, deliveries)


def _put_all(deliveries: Iterable[tuple[Ticket, Delivery]]) -> None:
    for ticket, delivery in deliveries:
        ticket.put(delivery)


class EngineWorker:
    """Owns the thread. Use as a context manager, or call `close`."""

    def __init__(self, engine: Engine, *, max_waiting: int) -> None:
        self.engine = engine
        self.num_cancelled = 0
        self.stats = engine.stats()  # as of the last step; replaced, never changed
        self._commands: queue.SimpleQueue[_Submit | _Abort | None] = queue.SimpleQueue()
        self._open: dict[int, tuple[Ticket, int]] = {}  # request id -> its ticket and choice
        self._lock = threading.Lock()
        self._next_id = 0
        self._max_waiting = max_waiting
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="emberbox-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "EngineWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still takes requests."""
        return self._thread.is_alive() and not self._is_closed

    @property
    def num_open(self) -> int:
        """Requests that run or wait; each choice is one."""
        return len(self._open)

    def check_room(self, num_choices: int = 1) -> None:
        """Raises EngineStopped, or TooManyWaiting when that many choices more are too many.

        Where nobody waits any number is taken: it would not fit better later.
        """
        if not self.is_alive:
            raise _stopped()
        num_waiting = len(self._open) - self.stats.num_running
        if num_waiting > 0 and num_waiting + num_choices > self._max_waiting:
            raise TooManyWaiting(
                f"{num_waiting} requests wait and {num_choices} more came, "
                f"the limit is {self._max_waiting}",
                hint="try again later",
            )

    def submit(self, requests: Sequence[tuple[Prompt, SamplingParams]]) -> Ticket:
        """Queue the choices of one HTTP request together, from a running event loop.

        Raises as `check_room` does.
        """
        with self._lock:
            self.check_room(len(requests))
            ids = range(self._next_id, self._next_id + len(requests))
            self._next_id = ids.stop
            ticket = Ticket(self, ids)
            self._open.update({id_: (ticket, index) for index, id_ in enumerate(ids)})
            self._commands.put(_Submit(ticket, tuple(requests)))
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """End what still runs of a ticket before the next step."""
        self._commands.put(_Abort(ticket))

    def close(self, timeout_seconds: float = 10.0) -> None:
        """End the thread after the current step; every open request fails with EngineStopped."""
        with self._lock:
            self._is_closed = True
        self._commands.put(None)
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            while self._obey_all():
                self._step()
        except BaseException as error:
            log.critical("the engine thread died: %s", type(error).__name__, exc_info=error)
        finally:
            with self._lock:
                self._is_closed = True
                left, self._open = self._open, {}
            outbox = _Outbox()
            for ticket, index in left.values():
                outbox.add(ticket, Delivery(index, _stopped()))
            outbox.send()

    def _obey_all(self) -> bool:
        """Every command that has come; waits for one while there is nothing to compute.

        Whether to go on.
        """
        while not self._is_closed:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                break
            if command is None:
                return False
            self._obey(command)
            self.stats = self.engine.stats()
        return not self._is_closed

    def _obey(self, command: _Submit | _Abort) -> None:
        ticket = command.ticket
        if isinstance(command, _Abort):
            still_open = [id_ for id_ in ticket.request_ids if self._forget(id_)]
            self.num_cancelled += bool(still_open)
            for id_ in still_open:
                self.engine.abort(id_)
            return
        outbox = _Outbox()
        for index, id_ in enumerate(ticket.request_ids):
            try:
                self.engine.submit(id_, *command.requests[index])
            except Exception as error:
                self._forget(id_)
                outbox.add(ticket, Delivery(index, error))
        outbox.send()

    def _step(self) -> None:
        outbox = _Outbox()
        for came in self.engine.step():
            if came.request_id not in self._open:
                log.error("the engine sent an event for request %d, not open", came.request_id)
                continue
            ticket, index = self._open[came.request_id]
            event = came.event if came.event is not None else came.error
            assert event is not None, "a RequestEvent has an event or an error"
            delivery = Delivery(index, event, came.num_cached)
            if delivery.is_last:
                self._forget(came.request_id)
            outbox.add(ticket, delivery)
        self.stats = self.engine.stats()
        outbox.send()

    def _forget(self, request_id: int) -> bool:
        """Whether the request was open."""
        with self._lock:
            return self._open.pop(request_id, None) is not None


def _stopped() -> EngineStopped:
    return EngineStopped("the engine has stopped", hint="restart the server")
