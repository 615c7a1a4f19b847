"""From the bytes of a request to fields of the right type and in range. Knows the wire, no engine.

Three kinds of field: those we act on (the request structs), those that would change the output and
that we do not implement (`REFUSED`, refused by name), and the rest, accepted and reported as
ignored. Shared by all routes that generate; `chat_request` and `completion_request` add their own.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from emberbox.errors import RequestError
from emberbox.server.failures import InvalidJson, UnsupportedParameter
from emberbox.server.protocol import GenerationRequest, StreamOptions, Thinking

MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
MAX_TOKEN_ID = 2**31 - 1

_Request = TypeVar("_Request", bound=GenerationRequest)
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
    "add_generation_prompt": _only(True),
    "allowed_token_ids": _only([]),
    "audio": _never,
    "bad_words": _only([]),
    "best_of": _is_number(1),
    "chat_template": _never,
    "continue_final_message": _is_false,
    "documents": _only([]),
    "dry_multiplier": _is_number(0),
    "echo": _is_false,
    "function_call": _only("none", "auto"),
    "functions": _only([]),
    "grammar": _only(""),
    "guided_choice": _never,
    "guided_grammar": _never,
    "guided_json": _never,
    "guided_regex": _never,
    "json_schema": _never,
    "length_penalty": _is_number(1),
    "logits_processors": _only([]),
    "mirostat": _is_number(0),
    "modalities": _only(["text"]),
    "prediction": _never,
    "prompt_embeds": _never,
    "prompt_logprobs": _never,
    "response_format": _only({"type": "text"}),
    "structured_outputs": _never,
    "suffix": _only(""),
    "thinking_budget": _never,
    "tool_choice": _only("none", "auto"),
    "tools": _only([]),
    "truncate_prompt_tokens": _never,
    "typical_p": _is_number(1),
    "use_beam_search": _is_false,
    "web_search_options": _never,
    "xtc_probability": _is_number(0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(Generic[_Request]):
    """A request whose fields are of the right type and in range, and the names of those ignored."""

    request: _Request
    ignored: tuple[str, ...]


def parse(body: bytes, kind: type[_Request]) -> Parsed[_Request]:
    """Decode and check what all routes share. Raises RequestError or a kind of it."""
    fields = {name: value for name, value in _decode(body).items() if value is not None}
    _refuse_unsupported(fields)
    try:
        request = msgspec.convert(fields, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from None
    except RecursionError:
        raise _too_deep() from None
    _check_ranges(request)
    _check_tokens(request)
    return Parsed(request=request, ignored=_ignored(fields, kind))


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    """The stop strings as a tuple, however they were sent."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def between(name: str, value: float | None, low: float, high: float | None) -> None:
    """Raises RequestError when the value is outside; None is absent."""
    if value is not None and (value < low or (high is not None and value > high)):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(
            f"{name}: {value} is out of range", param=name, hint=f"expected a number {bounds}"
        )


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


def _check_ranges(request: GenerationRequest) -> None:
    between("n", request.n, 1, MAX_CHOICES)
    between("max_tokens", request.max_tokens, 1, None)
    between("min_tokens", request.min_tokens, 0, None)
    between("temperature", request.temperature, 0, 2)
    between("top_p", request.top_p, 0, 1)
    between("top_k", request.top_k, -1, None)
    between("min_p", request.min_p, 0, 1)
    between("presence_penalty", request.presence_penalty, -2, 2)
    between("frequency_penalty", request.frequency_penalty, -2, 2)
    between("repetition_penalty", request.repetition_penalty, 0.01, 100)
    between("seed", request.seed, -(2**63), 2**63 - 1)
    stops = stop_strings(request)
    if len(stops) > MAX_STOPS or "" in stops:
        raise RequestError(
            f"stop: got {len(stops)} strings{', one of them empty' if '' in stops else ''}",
            param="stop",
            hint=f"expected up to {MAX_STOPS} strings that are not empty",
        )


def _check_tokens(request: GenerationRequest) -> None:
    """Token ids that a request names; whether the model has them is the engine's to say."""
    if len(request.stop_token_ids) > MAX_STOP_TOKENS:
        raise RequestError(
            f"stop_token_ids: got {len(request.stop_token_ids)}",
            param="stop_token_ids",
            hint=f"expected up to {MAX_STOP_TOKENS} token ids",
        )
    for i, token_id in enumerate(request.stop_token_ids):
        between(f"stop_token_ids[{i}]", token_id, 0, MAX_TOKEN_ID)
    if len(request.logit_bias) > MAX_BIASES:
        raise RequestError(
            f"logit_bias: got {len(request.logit_bias)} tokens",
            param="logit_bias",
            hint=f"expected up to {MAX_BIASES}",
        )
    for key, bias in request.logit_bias.items():
        if not re.fullmatch(r"0|[1-9]\d{0,9}", key, flags=re.ASCII):
            raise RequestError(
                f"logit_bias: {key[:40]!r} is not a token id",
                param="logit_bias",
                hint='expected token ids as text, such as {"17": -100}',
            )
        between("logit_bias", bias, -100, 100)
        between("logit_bias", int(key), 0, MAX_TOKEN_ID)


def _ignored(fields: dict[str, object], kind: type[GenerationRequest]) -> tuple[str, ...]:
    """Names of fields that nobody reads; `chat_request` adds those inside messages."""
    known = set(kind.__struct_fields__)
    names = {name for name in fields if name not in REFUSED} - known
    for name, struct in (("stream_options", StreamOptions), ("thinking", Thinking)):
        inner = fields.get(name)
        if name in known and isinstance(inner, dict):
            names |= {f"{name}.{key}" for key in set(inner) - set(struct.__struct_fields__)}
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
