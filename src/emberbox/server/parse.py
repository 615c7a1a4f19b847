"""From the bytes of a chat request to a checked ChatRequest. Knows the wire, no engine.

Three kinds of field: those we act on (`ChatRequest`), those that would change the output and that
we do not implement (`REFUSED`, refused by name), and the rest, accepted and reported as ignored.
What stands inside `messages` is checked by `emberbox.chat`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from emberbox.errors import RequestError
from emberbox.server.failures import InvalidJson, UnsupportedParameter
from emberbox.server.protocol import ChatRequest, StreamOptions, Thinking

MAX_STOPS = 4
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
_Harmless = Callable[[object], bool]


def _only(*values: object) -> _Harmless:
    """Values that ask for nothing; False and 0 are told apart."""
    return lambda value: any(value == one and type(value) is type(one) for one in values)


def _is_number(number: float) -> _Harmless:
    return lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and value == number
    )


def _is_false(value: object) -> bool:
    return value is False


def _never(_: object) -> bool:
    return False


# Field -> whether a value of it leaves the output as it is.
REFUSED: dict[str, _Harmless] = {
    "audio": _never,
    "bad_words": _only([]),
    "best_of": _is_number(1),
    "continue_final_message": _is_false,
    "documents": _only([]),
    "echo": _is_false,
    "frequency_penalty": _is_number(0),
    "function_call": _only("none", "auto"),
    "functions": _only([]),
    "grammar": _only(""),
    "guided_choice": _never,
    "guided_grammar": _never,
    "guided_json": _never,
    "guided_regex": _never,
    "ignore_eos": _is_false,
    "json_schema": _never,
    "length_penalty": _is_number(1),
    "logit_bias": _only({}),
    "logprobs": _is_false,
    "min_p": _is_number(0),
    "min_tokens": _is_number(0),
    "modalities": _only(["text"]),
    "n": _is_number(1),
    "prediction": _never,
    "presence_penalty": _is_number(0),
    "prompt_logprobs": _never,
    "repetition_penalty": _is_number(1),
    "response_format": _only({"type": "text"}),
    "stop_token_ids": _only([]),
    "structured_outputs": _never,
    "suffix": _only(""),
    "thinking_budget": _never,
    "tool_choice": _only("none", "auto"),
    "tools": _only([]),
    "top_logprobs": _is_number(0),
    "typical_p": _is_number(1),
    "use_beam_search": _is_false,
    "web_search_options": _never,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request whose fields are of the right type and in range, and the names of those ignored."""

    chat: ChatRequest
    ignored: tuple[str, ...]


def parse_chat_request(body: bytes) -> ParsedRequest:
    """Decode and check one body. Raises RequestError or a kind of it, naming the field."""
    fields = {name: value for name, value in _decode(body).items() if value is not None}
    _refuse_unsupported(fields)
    try:
        chat = msgspec.convert(fields, ChatRequest, strict=True)
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from None
    except RecursionError:
        raise _too_deep() from None
    _check_ranges(chat)
    return ParsedRequest(chat=chat, ignored=_ignored(fields, chat))


def _decode(body: bytes) -> dict[str, object]:
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJson(
            f"the body is not valid JSON: {error}", hint="expected one JSON object in UTF-8"
        ) from None
    if not isinstance(value, dict):
        raise InvalidJson(
            f"the body is a JSON {_json_kind(value)}, not an object",
            hint='expected {"model": ..., "messages": [...]}',
        )
    return value


def _refuse_unsupported(fields: dict[str, object]) -> None:
    for name, harmless in REFUSED.items():
        if name in fields and not harmless(fields[name]):
            raise UnsupportedParameter(
                f"{name}: this server does not implement it, and it would change the answer",
                param=name,
                hint=f"leave {name} out",
            )
    options = fields.get("stream_options")
    if isinstance(options, dict) and options.get("continuous_usage_stats"):
        name = "stream_options.continuous_usage_stats"
        raise UnsupportedParameter(f"{name}: is not implemented", param=name, hint="leave it out")


def _check_ranges(chat: ChatRequest) -> None:
    if not chat.messages:
        raise RequestError("messages: is empty", param="messages", hint="send at least one message")
    for name in ("max_tokens", "max_completion_tokens"):
        _between(name, getattr(chat, name), 1, None)
    _between("temperature", chat.temperature, 0, 2)
    _between("top_p", chat.top_p, 0, 1)
    _between("top_k", chat.top_k, -1, None)
    _between("seed", chat.seed, -(2**63), 2**63 - 1)
    stops = stop_strings(chat)
    if len(stops) > MAX_STOPS or "" in stops:
        raise RequestError(
            f"stop: got {len(stops)} strings{', one of them empty' if '' in stops else ''}",
            param="stop",
            hint=f"expected up to {MAX_STOPS} strings that are not empty",
        )


def stop_strings(chat: ChatRequest) -> tuple[str, ...]:
    """The stop strings as a tuple, however they were sent."""
    if chat.stop is None:
        return ()
    return (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop)


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


def _between(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is not None and (value < low or (high is not None and value > high)):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(
            f"{name}: {value} is out of range", param=name, hint=f"expected a number {bounds}"
        )


def _ignored(fields: dict[str, object], chat: ChatRequest) -> tuple[str, ...]:
    """Names of fields that nobody reads, with those inside messages as messages[].name."""
    names = {name for name in fields if name not in REFUSED} - set(ChatRequest.__struct_fields__)
    for message in chat.messages:
        extra = {key for key, value in message.items() if value not in (None, [], "")}
        names |= {f"messages[].{key}" for key in extra - MESSAGE_FIELDS}
    for name, kind in (("stream_options", StreamOptions), ("thinking", Thinking)):
        inner = fields.get(name)
        if isinstance(inner, dict):
            names |= {f"{name}.{key}" for key in set(inner) - set(kind.__struct_fields__)}
    return tuple(sorted(names))


def _wrong_type(error: msgspec.ValidationError) -> RequestError:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`"; the path becomes `param`."""
    text, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    missing = re.search(r"required field `(\w+)`", text)
    unknown = re.search(r"unknown field `([^`]+)`", text)
    found = missing or unknown
    if found:
        param = f"{param}.{found[1]}" if param else found[1]
    message = f"{param}: {text[:1].lower()}{text[1:]}" if param else text
    if unknown:
        return UnsupportedParameter(message, param=param, hint="leave it out")
    return RequestError(message, param=param)


def _too_deep() -> InvalidJson:
    return InvalidJson("the body nests too deeply", hint="flatten it")


def _json_kind(value: object) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")
