"""The engine thread: one request runs at a time, the others wait in order.

A request enters through `submit` and comes back as events on the caller's event loop: one hop in,
one hop out. A cancelled request stops after the step it is in. Knows no HTTP.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from emberbox.engine.request import FinishReason, Prompt, SamplingParams, TokenEvent
from emberbox.server.failures import EngineStopped, TooManyWaiting

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What the server needs of an engine; `emberbox.LLM` is one."""

    @property
    def model_id(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        reasoning_effort: str | None = None,
        enable_thinking: bool | None = None,
        clear_thinking: bool | None = None,
    ) -> Prompt: ...

    def stream(
        self, prompt: Prompt, params: SamplingParams, should_abort: Callable[[], bool]
    ) -> Iterator[TokenEvent]: ...


@dataclass(eq=False, slots=True)
class Job:
    """One submitted request. `events` gives TokenEvents, then None or what ended it early."""

    prompt: Prompt
    params: SamplingParams
    loop: asyncio.AbstractEventLoop
    events: "asyncio.Queue[TokenEvent | BaseException | None]" = field(
        default_factory=asyncio.Queue
    )
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Stop after the current step; no further event is delivered."""
        self.cancelled.set()

    def deliver(self, event: TokenEvent | BaseException | None) -> None:
        """Called in the engine thread. A loop that has closed has nobody left to tell."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class EngineWorker:
    """Owns the thread. Use as a context manager, or call `close`."""

    def __init__(self, engine: Engine, *, max_waiting: int) -> None:
        self.engine = engine
        self.num_cancelled = 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._open: set[Job] = set()
        self._lock = threading.Lock()
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
        """Requests that run or wait."""
        return len(self._open)

    def submit(self, prompt: Prompt, params: SamplingParams) -> Job:
        """Queue one request, from a running event loop. Raises EngineStopped or TooManyWaiting."""
        job = Job(prompt, params, asyncio.get_running_loop())
        with self._lock:
            if not self.is_alive:
                raise EngineStopped("the engine has stopped", hint="restart the server")
            if len(self._open) > self._max_waiting:
                raise TooManyWaiting(
                    f"{len(self._open)} requests run or wait, the limit is {self._max_waiting}",
                    hint="try again later",
                )
            self._open.add(job)
            self._jobs.put(job)
        return job

    def close(self, timeout_seconds: float = 10.0) -> None:
        """End the thread after the current step; every open request fails with EngineStopped."""
        with self._lock:
            self._is_closed = True
            for job in self._open:
                job.cancel()
        self._jobs.put(None)
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        reason: BaseException = EngineStopped("the engine has stopped", hint="restart the server")
        try:
            while (job := self._jobs.get()) is not None:
                self._serve(job)
        except BaseException as error:
            log.critical("the engine thread died: %s", type(error).__name__, exc_info=error)
        finally:
            with self._lock:
                self._is_closed = True
                left, self._open = self._open, set()
            for job in left:
                job.deliver(reason)

    def _serve(self, job: Job) -> None:
        """Run one request. Its own failure ends it alone; what is no Exception ends the thread."""
        ending: BaseException | None = None
        try:
            is_whole = not job.cancelled.is_set() and self._generate(job)
            if not is_whole:
                ending = EngineStopped("the request was cancelled before its reply was whole")
        except Exception as error:
            ending = error
        with self._lock:
            self._open.discard(job)
            self.num_cancelled += job.cancelled.is_set()
        job.deliver(ending)

    def _generate(self, job: Job) -> bool:
        """Deliver every event; whether the reply came to its end."""
        finish: FinishReason | None = None
        for event in self.engine.stream(job.prompt, job.params, job.cancelled.is_set):
            if job.cancelled.is_set():
                return False
            finish = event.finish
            job.deliver(event)
        return finish in (FinishReason.STOP, FinishReason.LENGTH)
