"""From the bytes of a request to what the engine is given and the answer it will fill.

Runs in a worker thread: decoding, templating and tokenising a long prompt must stall nobody's
stream. Everything that can be refused is refused here, before a byte of an answer is sent.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from emberbox import __version__
from emberbox.engine.request import Prompt, SamplingParams
from emberbox.errors import ContextLengthError, RequestError
from emberbox.server.answer import Answer, ChatAnswer, Heading, TextAnswer
from emberbox.server.chat_request import (
    asked_tokens,
    num_logprobs,
    parse_chat_request,
    reasoning_of,
)
from emberbox.server.completion_request import DEFAULT_MAX_TOKENS, parse_completion_request
from emberbox.server.failures import ModelNotFound
from emberbox.server.parse import stop_strings
from emberbox.server.protocol import GenerationRequest
from emberbox.server.worker import Engine

MAX_REPLIES = 128  # choices of all prompts together
SMALLEST_TOP_P = 1e-9  # top_p 0 is allowed on the wire and keeps the one best token
_SEEDS = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request ready for the engine. `clamped_to`: its limit, where a higher one was asked for."""

    requests: tuple[tuple[Prompt, SamplingParams], ...]
    answer: Answer
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]
    clamped_to: int | None


def prepare_chat(body: bytes, engine: Engine, model: str) -> Prepared:
    """A chat completion for the model served as `model`. Raises RequestError or a kind of it."""
    parsed = parse_chat_request(body)
    chat = parsed.request
    check_model(chat.model, model)
    reasoning = reasoning_of(chat)
    prompt = engine.prepare_chat(
        chat.messages,
        reasoning_effort=reasoning.effort,
        enable_thinking=reasoning.enabled,
        clear_thinking=reasoning.clear,
    )
    limits = _Limits(engine, "messages", chat, num_logprobs(chat))
    requests, clamped_to = limits.requests([prompt], asked_tokens(chat))
    heading = _heading("chatcmpl", engine, model, chat, [prompt])
    return Prepared(
        requests=requests,
        answer=ChatAnswer(heading, thinking=engine.starts_in_reasoning(prompt)),
        stream=chat.stream,
        include_usage=bool(chat.stream_options and chat.stream_options.include_usage),
        ignored=parsed.ignored,
        clamped_to=clamped_to,
    )


def prepare_completion(body: bytes, engine: Engine, model: str) -> Prepared:
    """A text completion for the model served as `model`. Raises RequestError or a kind of it."""
    completion = parse_completion_request(body)
    request = completion.parsed.request
    check_model(request.model, model)
    if len(completion.prompts) * request.n > MAX_REPLIES:
        raise RequestError(
            f"n: {len(completion.prompts)} prompts with {request.n} choices each",
            param="n",
            hint=f"expected up to {MAX_REPLIES} replies in all",
        )
    prompts = [engine.prepare(prompt) for prompt in completion.prompts]
    limits = _Limits(engine, "prompt", request, request.logprobs)
    requests, clamped_to = limits.requests(prompts, request.max_tokens or DEFAULT_MAX_TOKENS)
    options = request.stream_options
    return Prepared(
        requests=requests,
        answer=TextAnswer(_heading("cmpl", engine, model, request, prompts)),
        stream=request.stream,
        include_usage=bool(options and options.include_usage),
        ignored=completion.parsed.ignored,
        clamped_to=clamped_to,
    )


def check_model(asked: str | None, served: str) -> None:
    """Raises ModelNotFound when another model is asked for; None takes the one there is."""
    if asked is not None and asked != served:
        raise ModelNotFound(
            f"model: {asked!r} is not served here", param="model", hint=f"served: {served}"
        )


@dataclass(frozen=True, slots=True)
class _Limits:
    """How the replies of one request are chosen, and how long they may be."""

    engine: Engine
    param: str  # the field that holds the prompt
    request: GenerationRequest
    num_logprobs: int | None

    def requests(
        self, prompts: Sequence[Prompt], asked: int | None
    ) -> tuple[tuple[tuple[Prompt, SamplingParams], ...], int | None]:
        """Every choice of every prompt, and the smallest limit that is less than was asked for.

        Many clients always ask for 32,000 tokens, so a limit beyond the context is cut down to it;
        only a prompt that leaves no room is refused.
        """
        made: list[tuple[Prompt, SamplingParams]] = []
        clamped: list[int] = []
        for prompt in prompts:
            room = self._room(prompt)
            clamped += [room] if asked is not None and asked > room else []
            params = _sampling(self.request, min(asked or room, room), self.num_logprobs)
            self.engine.check(prompt, params)
            made += [(prompt, _seeded(params, choice)) for choice in range(self.request.n)]
        return tuple(made), min(clamped, default=None)

    def _room(self, prompt: Prompt) -> int:
        """Tokens a reply may have. Raises ContextLengthError with both numbers."""
        length, num_prompt = self.engine.max_model_len, len(prompt.token_ids)
        if num_prompt >= length:
            raise ContextLengthError(
                f"the context holds {length} tokens and the prompt has {num_prompt}",
                param=self.param,
                hint=f"shorten the {self.param}; the reply needs at least one token",
            )
        return self.engine.check(prompt, SamplingParams())


def _heading(
    kind: str, engine: Engine, model: str, request: GenerationRequest, prompts: Sequence[Prompt]
) -> Heading:
    options = request.stream_options
    return Heading(
        id=f"{kind}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        system_fingerprint=f"emberbox-{__version__}",
        num_prompt_tokens=tuple(len(prompt.token_ids) for prompt in prompts),
        num_choices=request.n,
        token_text=engine.token_text,
        reply_bytes=engine.reply_bytes,
        has_continuous_usage=bool(options and options.continuous_usage_stats),
    )


def _sampling(
    request: GenerationRequest, max_tokens: int, num_logprobs: int | None
) -> SamplingParams:
    defaults = SamplingParams()
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_p=defaults.top_p if request.top_p is None else max(request.top_p, SMALLEST_TOP_P),
        top_k=defaults.top_k if request.top_k is None else max(request.top_k, 0),
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in request.logit_bias.items()),
        logprobs=num_logprobs,
        seed=request.seed,
        stop=stop_strings(request),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
    )


def _seeded(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of one choice: the seed counts up, and wraps as a 64-bit integer does."""
    if params.seed is None or not choice:
        return params
    return replace(params, seed=(params.seed + choice + _SEEDS // 2) % _SEEDS - _SEEDS // 2)
