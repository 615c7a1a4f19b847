"""The wire types of the OpenAI routes, and nothing else.

Requests are decoded strictly: a field has its type or the request is refused. A null means absent.
"""

from typing import Literal

import msgspec


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream. `continuous_usage_stats` puts the counts so far into every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """The vendor's own switch for reasoning."""

    type: Literal["enabled", "disabled"]
    clear_thinking: bool | None = None


class TemplateOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Variables of the chat template that a client may set."""

    enable_thinking: bool | None = None
    clear_thinking: bool | None = None
    reasoning_effort: str | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and text completions share: how to choose tokens and how to answer."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """A chat completion. `emberbox.chat` checks the messages."""

    messages: list[dict[str, object]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateOptions | None = None
    thinking: Thinking | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """A text completion. `prompt` is text, texts, token ids or lists of them."""

    prompt: str | list[object]
    logprobs: int | None = None


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


class TokenAlternative(msgspec.Struct, frozen=True):
    """A token that could have been chosen. `bytes` are exact where `token` cannot be."""

    token: str
    bytes: list[int]
    logprob: float


class TokenEntry(msgspec.Struct, frozen=True):
    """A chosen token and its alternatives."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TokenAlternative]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry for every token of the completion, those of the reasoning included."""

    content: list[TokenEntry]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """The older shape: columns. Offsets are letters from the beginning of the completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ReplyMessage(msgspec.Struct, frozen=True):
    """The assistant's message. `content` is null when the reply never got beyond its reasoning."""

    content: str | None
    reasoning_content: str | None
    role: str = "assistant"


class Choice(msgspec.Struct, frozen=True):
    """One choice of a plain answer."""

    message: ReplyMessage
    finish_reason: str
    index: int = 0
    logprobs: ChatLogprobs | None = None


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
    logprobs: ChatLogprobs | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. `usage` comes in a last chunk without choices, if asked for."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str


class TextChoice(msgspec.Struct, frozen=True):
    """One choice of a text completion, whole or what one chunk adds."""

    text: str
    index: int
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A text completion, and every event of one that is streamed."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
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
