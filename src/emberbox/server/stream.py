"""Sends an answer as server-sent events, and notices when the client has gone.

A failure is sent as an error event, so that a cut reply is never taken for a whole one; a whole one
ends with `data: [DONE]`, before it the usage if asked for. While there is nothing to send, a
comment line goes out by the clock.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from emberbox.server.answer import Answer
from emberbox.server.failures import to_failure
from emberbox.server.metrics import RequestClock
from emberbox.server.worker import Ticket

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class EventStream:
    """An ASGI response that streams one ticket."""

    ticket: Ticket
    answer: Answer
    clock: RequestClock
    headers: Mapping[str, str]
    include_usage: bool
    keepalive_seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or cancel the ticket when the client goes or anything fails."""
        try:
            await until_disconnect(receive, self._send_all(send))
        finally:
            self.ticket.cancel()

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
        """The body, one piece per step. Raises what ended a choice early."""
        clock = asyncio.get_running_loop().time
        last_sent = clock()
        while not self.answer.is_whole:
            try:
                async with asyncio.timeout_at(last_sent + self.keepalive_seconds):
                    deliveries = await self.ticket.take()
            except TimeoutError:
                yield KEEP_ALIVE
                last_sent = clock()
                continue
            failure, pieces = None, []
            for delivery in deliveries:
                self.clock.saw(delivery)
                try:
                    pieces += [_line(chunk) for chunk in self.answer.push(delivery)]
                except Exception as error:
                    failure = error
                    break
            if pieces:
                yield b"".join(pieces)
                last_sent = clock()
            if failure is not None:
                raise failure
        if self.include_usage:
            yield _line(self.answer.usage_chunk())
        yield DONE


def _line(chunk: msgspec.Struct) -> bytes:
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
