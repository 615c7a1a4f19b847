"""Asks an OpenAI-compatible server and times the reply, through the package openai.

What goes wrong becomes one of emberbox' own errors, which say where. Knows no terminal.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from emberbox.errors import EmberboxError, EnvironmentProblem, RequestError

if TYPE_CHECKING:
    from openai import OpenAI

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of a reply; `finish` is None when it was stopped early, and the counts are 0 then.

    Times in seconds from the sending of the request; the first token ends the reading of the
    prompt.
    """

    content: str
    reasoning: str
    finish: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    first_token_seconds: float
    total_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first over the time they took."""
        elapsed = self.total_seconds - self.first_token_seconds
        return (self.num_completion_tokens - 1) / elapsed if elapsed > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """All fields for JSON, and the speed."""
        return {**asdict(self), "tokens_per_second": round(self.tokens_per_second, 2)}

    def speed(self) -> str:
        """One line for people."""
        if self.finish is None:
            return f"stopped after {self.total_seconds:.1f} s"
        cut = ", cut at the limit" if self.finish == "length" else ""
        return (
            f"{self.num_completion_tokens} tokens{cut} at {self.tokens_per_second:.1f} tokens/s; "
            f"the first after {self.first_token_seconds:.2f} s, {self.num_cached_tokens} of "
            f"{self.num_prompt_tokens} prompt tokens from the cache"
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reply as it came: of its thought, or of its text."""

    text: str
    is_reasoning: bool


class ReplyStream:
    """One reply under way: iterate over its pieces; `reply()` is what has come so far."""

    def __init__(self, chunks: Iterable[Any], started: float) -> None:
        self._chunks = chunks
        self._started = started
        self._first: float | None = None
        self._ended: float | None = None
        self._parts: dict[bool, list[str]] = {False: [], True: []}
        self._finish: str | None = None
        self._usage: Any = None

    def __iter__(self) -> Iterator[Piece]:
        for chunk in self._chunks:
            self._usage = chunk.usage or self._usage
            for choice in chunk.choices:
                self._first = self._first or time.perf_counter()
                self._finish = choice.finish_reason or self._finish
                thought = getattr(choice.delta, "reasoning_content", None)
                for text, is_reasoning in ((thought, True), (choice.delta.content, False)):
                    if text:
                        self._parts[is_reasoning].append(text)
                        yield Piece(text, is_reasoning)
        self._ended = time.perf_counter()
        if self._finish is None:
            raise EnvironmentProblem("the reply broke off before its end")

    def reply(self) -> Reply:
        """The whole reply, or as much of it as there is."""
        ended = self._ended or time.perf_counter()
        usage = self._usage
        details = usage.prompt_tokens_details if usage else None
        return Reply(
            content="".join(self._parts[False]),
            reasoning="".join(self._parts[True]),
            finish=self._finish if self._ended else None,
            num_prompt_tokens=usage.prompt_tokens if usage else 0,
            num_cached_tokens=(details.cached_tokens or 0) if details else 0,
            num_completion_tokens=usage.completion_tokens if usage else 0,
            first_token_seconds=round((self._first or ended) - self._started, 4),
            total_seconds=round(ended - self._started, 4),
        )


class ChatClient:
    """One server and the model it serves. `connect` makes it."""

    def __init__(self, client: "OpenAI", url: str) -> None:
        self._client, self.url = client, url
        with _our_errors(url):
            models = getattr(client.models.list(), "data", None)
        if not models:
            raise EnvironmentProblem(
                f"{url}: lists no model at /v1/models", hint="is this an OpenAI-compatible server?"
            )
        self.model: str = models[0].id
        self.inputs: Sequence[str] = getattr(models[0], "input_modalities", ("text", "image"))

    @contextmanager
    def ask(
        self, messages: Sequence[Mapping[str, object]], options: Mapping[str, object]
    ) -> Iterator[ReplyStream]:
        """The reply to `messages`; `options` are further fields of the request.

        Leaving the block early ends the reply on the server as well.
        """
        started = time.perf_counter()
        wire: Any = list(messages)
        with _our_errors(self.url):
            chunks = self._client.chat.completions.create(
                model=self.model,
                messages=wire,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=dict(options),
            )
        with chunks:
            yield ReplyStream(_from_wire(chunks, self.url), started)


def need_openai() -> None:
    """Raises EnvironmentProblem without the package openai; to be known before a long load."""
    try:
        import openai  # noqa: F401
    except ImportError:
        raise EnvironmentProblem(
            "this verb asks through the package openai, which is not installed",
            hint="pip install openai",
        ) from None


@contextmanager
def connect(url: str, api_key: str | None) -> Iterator[ChatClient]:
    """A client of the server at `url` (with or without /v1). Raises EnvironmentProblem."""
    need_openai()
    from openai import DefaultHttpxClient, OpenAI

    base = url.rstrip("/").removesuffix("/v1")
    # Proxies of the environment must not be asked for a server on this machine.
    is_local = urlsplit(base).hostname in LOOPBACK
    with ExitStack() as stack:
        http = stack.enter_context(DefaultHttpxClient(trust_env=not is_local))
        client = OpenAI(
            base_url=f"{base}/v1", api_key=api_key or "none", http_client=http, max_retries=0
        )
        yield ChatClient(stack.enter_context(client), base)


def _from_wire(chunks: Iterable[Any], url: str) -> Iterator[Any]:
    """The chunks. Errors of reading them become ours; what their reader does with them does not."""
    with _our_errors(url, "the reply broke off: the server went away"):
        yield from chunks


@contextmanager
def _our_errors(url: str, gone: str = "no server answers there") -> Iterator[None]:
    """Whatever the client library raises as an error that names the server and what to do."""
    import openai

    try:
        yield
    except EmberboxError:
        raise
    except openai.APIStatusError as error:
        body = error.body if isinstance(error.body, dict) else {}
        raise RequestError(str(body.get("message", f"{url}: {error.message}"))) from None
    except (openai.APIConnectionError, openai.APITimeoutError):
        raise EnvironmentProblem(
            f"{url}: {gone}",
            hint="start one: emberbox serve PATH; or name a folder: emberbox chat PATH",
        ) from None
    except Exception as error:  # a broken transport comes as the HTTP library's own error
        raise EnvironmentProblem(f"{url}: {error or type(error).__name__}") from error
