"""The routes: models, completions, health, metrics. Each reads the wire, asks the worker, answers.

What a request means is decided in `prepare`; what its answer looks like in `answer`.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from emberbox.errors import RequestError
from emberbox.server.answer import Answer
from emberbox.server.failures import BodyTooLarge, EngineStopped, to_failure
from emberbox.server.metrics import CONTENT_TYPE, Metrics, RequestClock
from emberbox.server.prepare import Prepared, check_model, prepare_chat, prepare_completion
from emberbox.server.protocol import ModelCard, ModelList
from emberbox.server.stream import EventStream, until_disconnect
from emberbox.server.worker import Engine, EngineWorker, Ticket
from emberbox.settings import ServeSettings

log = logging.getLogger(__name__)

MAX_LOGGED_COUNTS = 64

Prepare = Callable[[bytes, Engine, str], Prepared]


class Routes:
    """The endpoints over one worker."""

    def __init__(
        self,
        worker: EngineWorker,
        settings: ServeSettings,
        modalities: tuple[str, ...],
        metrics: Metrics,
    ) -> None:
        self.worker = worker
        self.settings = settings
        self.model = settings.model_name or worker.engine.model_id
        self.started = int(time.time())
        self._modalities = modalities
        self._metrics = metrics
        self._logged: set[int] = set()

    async def health(self, _: Request) -> Response:
        """200 while the engine thread takes requests, else 503."""
        if not self.worker.is_alive:
            raise EngineStopped("the engine has stopped", hint="restart the server")
        return _json({"status": "ok", "model": self.model, "open_requests": self.worker.num_open})

    async def metrics(self, _: Request) -> Response:
        """Everything that is counted, for Prometheus."""
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def models(self, _: Request) -> Response:
        """All models: the one."""
        return _json(ModelList([self._card()]))

    async def model_card(self, request: Request) -> Response:
        """One model by its name."""
        check_model(request.path_params["name"], self.model)
        return _json(self._card())

    async def chat_completions(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions, plain or streamed."""
        return await self._generate(request, prepare_chat)

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions, plain or streamed."""
        return await self._generate(request, prepare_completion)

    async def _generate(self, request: Request, prepare: Prepare) -> ASGIApp:
        clock = RequestClock(self._metrics)
        body = await read_body(request, self.settings.max_body_bytes)
        self.worker.check_room()  # before the work of reading the request, too
        ready = await asyncio.to_thread(prepare, body, self.worker.engine, self.model)
        headers = self._headers(ready)
        ticket = self.worker.submit(ready.requests)
        if ready.stream:
            return EventStream(
                ticket=ticket,
                answer=ready.answer,
                clock=clock,
                headers=headers,
                include_usage=ready.include_usage,
                keepalive_seconds=self.settings.keepalive_seconds,
            )
        try:
            is_whole = await until_disconnect(
                request.receive, _collect(ticket, ready.answer, clock)
            )
        finally:
            ticket.cancel()
        if not is_whole:
            raise ClientDisconnect
        return _json(ready.answer.whole(), headers=headers)

    def _headers(self, ready: Prepared) -> dict[str, str]:
        """What the body cannot say: fields nobody reads, and a limit that was cut down."""
        headers = {}
        if ready.ignored:
            self._log_ignored(len(ready.ignored))
            headers["x-emberbox-ignored"] = _header_text(ready.ignored)
        if ready.clamped_to is not None:
            headers["x-emberbox-max-tokens"] = str(ready.clamped_to)
        return headers

    def _card(self) -> ModelCard:
        length = self.worker.engine.max_model_len
        return ModelCard(
            id=self.model,
            created=self.started,
            max_model_len=length,
            context_length=length,
            input_modalities=self._modalities,
        )

    def _log_ignored(self, count: int) -> None:
        # The names are the client's text, so the log has their number alone.
        if count not in self._logged and len(self._logged) < MAX_LOGGED_COUNTS:
            self._logged.add(count)
            log.info("a request carries %d fields that are ignored; its answer names them", count)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, of at most `max_bytes`. Raises BodyTooLarge before more than that is held."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            f"the content type is {kind!r}",
            hint="expected application/json (curl: -H 'Content-Type: application/json')",
        )
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise BodyTooLarge(
                f"the body is larger than {max_bytes} bytes",
                hint="send smaller pictures or raise --max-body-bytes",
            )
        parts.append(part)
    return b"".join(parts)


async def _collect(ticket: Ticket, answer: Answer, clock: RequestClock) -> bool:
    """Fill `answer` to its end; True then. Raises what ended a choice early."""
    while not answer.is_whole:
        for delivery in await ticket.take():
            clock.saw(delivery)
            answer.add(delivery)
    return True


def _header_text(names: tuple[str, ...]) -> str:
    """Names come from the client: what could end or forge a header becomes a question mark."""
    safe = [re.sub(r"[^\w.\[\]-]", "?", name[:64], flags=re.ASCII) for name in names[:16]]
    return ", ".join(safe) + (", ..." if len(names) > len(safe) else "")


def _json(value: object, *, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers=headers)


def failure_response(error: BaseException, headers: dict[str, str] | None = None) -> Response:
    """The error answer for `error`."""
    failure = to_failure(error)
    extra = {"retry-after": "5"} if failure.status == 503 else {}
    return Response(
        failure.to_json(),
        status_code=failure.status,
        media_type="application/json",
        headers={**extra, **(headers or {})},
    )
