"""Sends a reply as server-sent events, and notices when the client has gone.

The first chunk carries the role, the last one the finish reason; then the usage chunk if asked for,
then `data: [DONE]`. A failure is sent as an error event, so that a cut reply is never taken for a
whole one. While there is nothing to send, a comment line goes out by the clock.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from emberbox.server.failures import to_failure
from emberbox.server.protocol import Chunk, ChunkChoice, Delta
from emberbox.server.reply import Reply
from emberbox.server.worker import Job

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What every chunk and answer of one request repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(slots=True, kw_only=True)
class EventStream:
    """An ASGI response that streams one job."""

    job: Job
    reply: Reply
    heading: Heading
    headers: Mapping[str, str]
    include_usage: bool
    keepalive_seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or cancel the job when the client goes or anything fails."""
        try:
            await until_disconnect(receive, self._send_all(send))
        finally:
            self.job.cancel()

    async def _send_all(self, send: Send) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        headers |= {"x-accel-buffering": "no", **self.headers}
        raw = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        try:
            async for data in self._until_end():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            data = b"data: " + to_failure(error).to_json() + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_end(self) -> AsyncIterator[bytes]:
        """Every line of the body. Raises what ended the job, if a failure did."""
        clock = asyncio.get_running_loop().time
        last_sent, has_started = clock(), False
        while True:
            try:
                async with asyncio.timeout_at(last_sent + self.keepalive_seconds):
                    event = await self.job.events.get()
            except TimeoutError:
                yield KEEP_ALIVE
                last_sent = clock()
                continue
            if event is None:
                break
            if isinstance(event, BaseException):
                raise event
            delta = self.reply.push(event).to_delta()
            if not has_started:
                has_started = True
                yield self._chunk(Delta(role="assistant", content=""))
                last_sent = clock()
            if delta is not None:
                yield self._chunk(delta)
                last_sent = clock()
        yield self._chunk(Delta(), finish_reason=self.reply.finish_reason)
        if self.include_usage:
            yield self._encode([], usage=True)
        yield DONE

    def _chunk(self, delta: Delta, finish_reason: str | None = None) -> bytes:
        return self._encode([ChunkChoice(delta, finish_reason)])

    def _encode(self, choices: list[ChunkChoice], *, usage: bool = False) -> bytes:
        chunk = Chunk(
            id=self.heading.id,
            created=self.heading.created,
            model=self.heading.model,
            system_fingerprint=self.heading.system_fingerprint,
            choices=choices,
            usage=self.reply.usage() if usage else msgspec.UNSET,
        )
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def until_disconnect(receive: Receive, work: Awaitable[_T]) -> _T | None:
    """The result of `work`, or None when the client went away first; `work` is then cancelled."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
