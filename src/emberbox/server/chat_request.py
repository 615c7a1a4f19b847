"""Chat completions on the wire: what their fields mean, beyond what all requests share.

Knows no engine. What stands inside `messages` is checked by `emberbox.chat`.
"""

from dataclasses import dataclass
from typing import TypeVar

from emberbox.errors import RequestError
from emberbox.server.parse import Parsed, between, parse
from emberbox.server.protocol import ChatRequest

MAX_TOP_LOGPROBS = 20
MESSAGE_FIELDS = frozenset(
    ("role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id")
)
EFFORTS = {
    "none": "none",
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}

_T = TypeVar("_T")


def parse_chat_request(body: bytes) -> Parsed[ChatRequest]:
    """Decode and check one body. Raises RequestError or a kind of it, naming the field."""
    parsed = parse(body, ChatRequest)
    chat = parsed.request
    if not chat.messages:
        raise RequestError("messages: is empty", param="messages", hint="send at least one message")
    between("max_completion_tokens", chat.max_completion_tokens, 1, None)
    between("top_logprobs", chat.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if chat.top_logprobs and not chat.logprobs:
        raise RequestError(
            f"top_logprobs: is {chat.top_logprobs} without logprobs",
            param="top_logprobs",
            hint='send "logprobs": true with it',
        )
    extra = {
        f"messages[].{key}"
        for message in chat.messages
        for key, value in message.items()
        if key not in MESSAGE_FIELDS and value not in (None, [], "")
    }
    return Parsed(request=chat, ignored=tuple(sorted({*parsed.ignored, *extra})))


def asked_tokens(chat: ChatRequest) -> int | None:
    """The limit of the reply; of two the newer name, `max_completion_tokens`, counts."""
    return chat.max_completion_tokens or chat.max_tokens


def num_logprobs(chat: ChatRequest) -> int | None:
    """Alternatives to report per token; None when no logprobs are asked for."""
    return chat.top_logprobs if chat.logprobs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """What three ways of asking for reasoning come to. `effort` None leaves it to the template."""

    enabled: bool
    effort: str | None
    clear: bool | None


def reasoning_of(chat: ChatRequest) -> Reasoning:
    """Join `reasoning_effort`, `chat_template_kwargs` and `thinking`. Contradictions are refused.

    Effort "none" switches reasoning off; no effort switches it on where another field has it off.
    """
    options, thinking = chat.chat_template_kwargs, chat.thinking
    effort = _agree(
        "reasoning_effort",
        _effort("reasoning_effort", chat.reasoning_effort),
        _effort(
            "chat_template_kwargs.reasoning_effort", options.reasoning_effort if options else None
        ),
    )
    enabled = _agree(
        "thinking",
        None if thinking is None else thinking.type == "enabled",
        options.enable_thinking if options else None,
    )
    clear = _agree(
        "thinking.clear_thinking",
        thinking.clear_thinking if thinking else None,
        options.clear_thinking if options else None,
    )
    return Reasoning(
        enabled=enabled is not False and effort != "none",
        effort=None if effort == "none" else effort,
        clear=clear,
    )


def _effort(name: str, value: str | None) -> str | None:
    if value is None:
        return None
    if value not in EFFORTS:
        raise RequestError(
            f"{name}: {value!r} is not an effort", param=name, hint=f"one of {', '.join(EFFORTS)}"
        )
    return EFFORTS[value]


def _agree(name: str, first: _T | None, second: _T | None) -> _T | None:
    if first is not None and second is not None and first != second:
        raise RequestError(
            f"{name}: is {first!r} and, in chat_template_kwargs, {second!r}",
            param=name,
            hint="send it once",
        )
    return second if first is None else first
