"""The routes: models, chat completions, health. Each reads the wire, asks the worker, answers.

Decoding, templating and tokenising run in a thread, so that a long prompt stalls nobody's stream.
"""

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from emberbox import __version__
from emberbox.engine.request import Prompt, SamplingParams
from emberbox.errors import ContextLengthError, RequestError
from emberbox.server.failures import BodyTooLarge, EngineStopped, ModelNotFound, to_failure
from emberbox.server.parse import (
    parse_chat_request,
    reasoning_of,
    stop_strings,
)
from emberbox.server.protocol import (
    ChatCompletion,
    ChatRequest,
    Choice,
    ModelCard,
    ModelList,
    ReplyMessage,
)
from emberbox.server.reply import Reply
from emberbox.server.stream import EventStream, Heading, until_disconnect
from emberbox.server.worker import Engine, EngineWorker, Job
from emberbox.settings import ServeSettings

log = logging.getLogger(__name__)

MAX_LOGGED_COUNTS = 64
SMALLEST_TOP_P = 1e-9  # top_p 0 is allowed on the wire and keeps the one best token


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request ready for the engine."""

    prompt: Prompt
    params: SamplingParams
    enable_thinking: bool
    stream: bool
    include_usage: bool
    headers: dict[str, str]


class Routes:
    """The endpoints over one worker."""

    def __init__(
        self, worker: EngineWorker, settings: ServeSettings, modalities: tuple[str, ...]
    ) -> None:
        self.worker = worker
        self.settings = settings
        self.model = settings.model_name or worker.engine.model_id
        self.started = int(time.time())
        self._modalities = modalities
        self._logged: set[int] = set()

    async def health(self, _: Request) -> Response:
        """200 while the engine thread takes requests, else 503."""
        if not self.worker.is_alive:
            raise EngineStopped("the engine has stopped", hint="restart the server")
        return _json({"status": "ok", "model": self.model, "open_requests": self.worker.num_open})

    async def models(self, _: Request) -> Response:
        """All models: the one."""
        return _json(ModelList([self._card()]))

    async def model_card(self, request: Request) -> Response:
        """One model by its name."""
        self._check_model(request.path_params["name"])
        return _json(self._card())

    async def chat_completions(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions, plain or streamed."""
        body = await read_body(request, self.settings.max_body_bytes)
        ready = await asyncio.to_thread(self._prepare, body)
        job = self.worker.submit(ready.prompt, ready.params)
        reply = Reply(
            num_prompt_tokens=len(ready.prompt.token_ids), enable_thinking=ready.enable_thinking
        )
        heading = Heading(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.model,
            system_fingerprint=f"emberbox-{__version__}",
        )
        if ready.stream:
            return EventStream(
                job=job,
                reply=reply,
                heading=heading,
                headers=ready.headers,
                include_usage=ready.include_usage,
                keepalive_seconds=self.settings.keepalive_seconds,
            )
        return await self._plain(request, job, reply, heading, ready.headers)

    async def _plain(
        self, request: Request, job: Job, reply: Reply, heading: Heading, headers: dict[str, str]
    ) -> Response:
        try:
            failure = await until_disconnect(request.receive, _collect(job, reply))
        finally:
            job.cancel()
        if failure is not None:
            raise failure
        content = reply.content or (None if reply.reasoning else "")
        message = ReplyMessage(content=content, reasoning_content=reply.reasoning or None)
        completion = ChatCompletion(
            id=heading.id,
            created=heading.created,
            model=heading.model,
            system_fingerprint=heading.system_fingerprint,
            choices=[Choice(message, reply.finish_reason)],
            usage=reply.usage(),
        )
        return _json(completion, headers=headers)

    def _prepare(self, body: bytes) -> Prepared:
        """Everything that needs no event loop; runs in a thread. Raises RequestError."""
        parsed = parse_chat_request(body)
        chat = parsed.chat
        if chat.model is not None:
            self._check_model(chat.model)
        reasoning = reasoning_of(chat)
        prompt = self.worker.engine.prepare_chat(
            chat.messages,
            reasoning_effort=reasoning.effort,
            enable_thinking=reasoning.enabled,
            clear_thinking=reasoning.clear,
        )
        self._log_ignored(parsed.ignored)
        headers = {"x-emberbox-ignored": _header_text(parsed.ignored)} if parsed.ignored else {}
        max_tokens, clamped = reply_room(chat, prompt, self.worker.engine)
        if clamped:
            headers["x-emberbox-max-tokens"] = str(max_tokens)
        options = chat.stream_options
        return Prepared(
            prompt=prompt,
            params=_sampling(chat, max_tokens),
            enable_thinking=reasoning.enabled,
            stream=chat.stream,
            include_usage=bool(options and options.include_usage),
            headers=headers,
        )

    def _card(self) -> ModelCard:
        length = self.worker.engine.max_model_len
        return ModelCard(
            id=self.model,
            created=self.started,
            max_model_len=length,
            context_length=length,
            input_modalities=self._modalities,
        )

    def _check_model(self, name: str) -> None:
        if name != self.model:
            raise ModelNotFound(
                f"model: {name!r} is not served here", param="model", hint=f"served: {self.model}"
            )

    def _log_ignored(self, names: tuple[str, ...]) -> None:
        # The names are the client's text, so the log has their number alone.
        count = len(names)
        if count and count not in self._logged and len(self._logged) < MAX_LOGGED_COUNTS:
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


def reply_room(chat: ChatRequest, prompt: Prompt, engine: Engine) -> tuple[int, bool]:
    """Tokens the reply may have, and whether that is less than was asked for.

    Many clients always ask for 32,000 tokens, so a limit beyond the context is cut down to it; only
    a prompt that leaves no room is refused. Of two limits `max_completion_tokens` counts.
    """
    asked = chat.max_completion_tokens or chat.max_tokens
    num_prompt = len(prompt.token_ids)
    room = engine.max_model_len - num_prompt
    if room < 1:
        raise ContextLengthError(
            f"the context holds {engine.max_model_len} tokens and the prompt has {num_prompt}",
            param="messages",
            hint="shorten the messages; the reply needs at least one token",
        )
    return min(asked or room, room), asked is not None and asked > room


def _sampling(chat: ChatRequest, max_tokens: int) -> SamplingParams:
    defaults = SamplingParams()
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=defaults.temperature if chat.temperature is None else chat.temperature,
        top_p=defaults.top_p if chat.top_p is None else max(chat.top_p, SMALLEST_TOP_P),
        top_k=defaults.top_k if chat.top_k is None else max(chat.top_k, 0),
        seed=chat.seed,
        stop=stop_strings(chat),
    )


async def _collect(job: Job, reply: Reply) -> BaseException | None:
    """Fill `reply` to its end; the failure that ended it, if one did."""
    while (event := await job.events.get()) is not None:
        if isinstance(event, BaseException):
            return event
        reply.push(event)
    return None


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
