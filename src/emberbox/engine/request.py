"""The words between an engine and whoever asks it: prompts, parameters, events. No tensors."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING

from emberbox.errors import RequestError

if TYPE_CHECKING:
    from emberbox.chat.media import Patches


class FinishReason(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises RequestError for a value out of range.

    temperature 0 is greedy. top_k 0 means no limit. `seed` makes a sampled reply repeatable.
    max_tokens None means as many as the context holds.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if type(value) is not int and (value is not None or name == "top_k"):
                raise RequestError(f"{name} is {value!r}; an integer", param=name)
        for name in ("temperature", "top_p"):
            if type(getattr(self, name)) not in (int, float):
                raise RequestError(f"{name} is {getattr(self, name)!r}; a number", param=name)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) for s in self.stop):
            raise RequestError(f"stop is {self.stop!r}; a tuple of strings", param="stop")
        self._check_ranges()

    def _check_ranges(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; at least 1", param="max_tokens")
        if not (isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise RequestError(
                f"temperature is {self.temperature}; 0 (greedy) to 100", param="temperature"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; above 0, at most 1", param="top_p")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; 0 (no limit) or more", param="top_k")
        if any(not text for text in self.stop):
            raise RequestError("stop holds an empty string", param="stop")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed is {self.seed}; a 64-bit integer", param="seed")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, image placeholders already expanded, and the pictures they stand for, in order."""

    token_ids: tuple[int, ...]
    images: tuple["Patches", ...] = field(default=())


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token and the text that became certain with it.

    `token_id` is None only in the last event of an aborted reply.
    """

    token_id: int | None
    text: str
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished reply. `reasoning` is set for chats whose reply began with a thought."""

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason
    num_prompt_tokens: int
    reasoning: str | None = None
