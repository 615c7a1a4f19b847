"""The wire types of /v1/models and /v1/chat/completions, and nothing else.

Requests are decoded strictly: a field has its type or the request is refused. A null means absent.
"""

from typing import Literal

import msgspec


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """The vendor's own switch for reasoning."""

    type: Literal["enabled", "disabled"]
    clear_thinking: bool | None = None


class TemplateOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Variables of the chat template that a client may set."""

    enable_thinking: bool | None = None
    clear_thinking: bool | None = None
    reasoning_effort: str | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a chat completion that this server acts on. `emberbox.chat` checks messages."""

    messages: list[dict[str, object]]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateOptions | None = None
    thinking: Thinking | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request; the end marker counts as a token of the completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ReplyMessage(msgspec.Struct, frozen=True):
    """The assistant's message. `content` is null when the reply never got beyond its reasoning."""

    content: str | None
    reasoning_content: str | None
    role: str = "assistant"


class Choice(msgspec.Struct, frozen=True):
    """The one choice of a plain answer."""

    message: ReplyMessage
    finish_reason: str
    index: int = 0
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A plain answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one chunk adds. Only the fields that are set are sent."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """The one choice of a chunk."""

    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. `usage` comes once, in a last chunk without choices, if asked for."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model. `context_length` repeats `max_model_len` for clients that look for it."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "emberbox"
    max_model_len: int
    context_length: int
    input_modalities: tuple[str, ...]
    output_modalities: tuple[str, ...] = ("text",)


class ModelList(msgspec.Struct, frozen=True):
    """All served models."""

    data: list[ModelCard]
    object: str = "list"
