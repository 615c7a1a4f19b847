"""Text completions on the wire: what their fields mean, beyond what all requests share.

Knows no engine: whether a token id exists and a prompt fits is said there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from emberbox.errors import RequestError
from emberbox.server.parse import Parsed, between, parse
from emberbox.server.protocol import CompletionRequest

DEFAULT_MAX_TOKENS = 16  # the wire's own default
MAX_LOGPROBS = 5
MAX_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A checked completion and its prompts, each a text or token ids."""

    parsed: Parsed[CompletionRequest]
    prompts: tuple[str | Sequence[int], ...]


def parse_completion_request(body: bytes) -> ParsedCompletion:
    """Decode and check one body. Raises RequestError or a kind of it, naming the field."""
    parsed = parse(body, CompletionRequest)
    between("logprobs", parsed.request.logprobs, 0, MAX_LOGPROBS)
    return ParsedCompletion(parsed, _prompts(parsed.request.prompt))


def _prompts(prompt: str | list[object]) -> tuple[str | Sequence[int], ...]:
    """The four forms as one: a text, texts, token ids, lists of token ids."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise RequestError("prompt: is empty", param="prompt", hint="send text or token ids")
    if type(prompt[0]) is int:
        return (_token_ids(prompt, "prompt"),)
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"prompt: holds {len(prompt)} prompts",
            param="prompt",
            hint=f"expected up to {MAX_PROMPTS}",
        )
    first = type(prompt[0])
    if first not in (str, list):
        raise _wrong_kind("prompt[0]")
    prompts: list[str | Sequence[int]] = []
    for i, item in enumerate(prompt):
        if type(item) is not first:
            raise _wrong_kind(f"prompt[{i}]")
        prompts.append(item if isinstance(item, str) else _token_ids(item, f"prompt[{i}]"))
    return tuple(prompts)


def _token_ids(items: object, name: str) -> list[int]:
    assert isinstance(items, list)
    if not items:
        raise RequestError(f"{name}: is empty", param=name, hint="send at least one token id")
    for i, item in enumerate(items):
        if type(item) is not int:
            raise _wrong_kind(f"{name}[{i}]")
    return items


def _wrong_kind(name: str) -> RequestError:
    return RequestError(
        f"{name}: is not of the kind expected here",
        param=name,
        hint="a prompt is a text, a list of texts, token ids, or a list of lists of token ids",
    )
