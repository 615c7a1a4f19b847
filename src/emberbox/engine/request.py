"""The words between an engine and whoever asks it: prompts, parameters, events. No tensors."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from emberbox.errors import RequestError

if TYPE_CHECKING:
    from emberbox.chat.media import Patches

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 256  # far below any vocabulary: min_tokens can never ban every token
_MAX_TOKEN_ID = 2**31 - 1

_INTEGERS = ("top_k", "min_tokens")
_INTEGERS_OR_NONE = ("max_tokens", "seed", "logprobs")
# name, least, most, what to say. NaN is in no range.
_RANGES = (
    ("temperature", 0.0, 100.0, "0 (greedy) to 100"),
    ("min_p", 0.0, 1.0, "0 (off) to 1"),
    ("presence_penalty", -2.0, 2.0, "-2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "-2 to 2"),
    ("top_p", 0.0, 1.0, "above 0, at most 1"),
    ("repetition_penalty", 0.0, 100.0, "above 0, at most 100"),
)
_ABOVE_ZERO = ("top_p", "repetition_penalty")


class FinishReason(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises RequestError for a value out of range.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 cut nothing. `seed` makes a sampled reply
    repeatable. Penalties: presence and frequency (subtracted) look at the reply, repetition
    (divides; 1 = none) at prompt and reply. logit_bias: (token id, -100..100) pairs, added first.
    logprobs: None = not reported, else the number of alternatives beside the chosen token.
    stop_token_ids end the reply as the model's own end tokens do; their text is not shown.
    max_tokens None means as many as the context holds. Nothing ends the first min_tokens tokens
    but max_tokens: end tokens are banned in them, and stop strings not looked for.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in (*_INTEGERS, *_INTEGERS_OR_NONE):
            value = getattr(self, name)
            if type(value) is not int and (value is not None or name in _INTEGERS):
                raise _refused(name, value, "an integer")
        for name, least, most, words in _RANGES:
            value = getattr(self, name)
            if type(value) not in (int, float):
                raise _refused(name, value, "a number")
            if not least <= value <= most or (name in _ABOVE_ZERO and value == 0):
                raise _refused(name, value, words)
        if type(self.ignore_eos) is not bool:
            raise _refused("ignore_eos", self.ignore_eos, "true or false")
        self._check_numbers()
        self._check_stops()
        self._check_logit_bias()

    @property
    def changes_logits(self) -> bool:
        """Whether a token's score depends on more than the network and the temperature."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0)
        return any(penalties) or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the argmax of the network's logits is all that a token needs."""
        return self.temperature == 0 and not self.changes_logits and self.logprobs is None

    def _check_numbers(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _refused("max_tokens", self.max_tokens, "at least 1")
        if self.top_k < 0:
            raise _refused("top_k", self.top_k, "0 (no limit) or more")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise _refused("seed", self.seed, "a 64-bit integer")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise _refused("logprobs", self.logprobs, f"0 to {MAX_LOGPROBS} alternatives")
        if self.min_tokens < 0:
            raise _refused("min_tokens", self.min_tokens, "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refused("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")

    def _check_stops(self) -> None:
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) for s in self.stop):
            raise _refused("stop", self.stop, "a tuple of strings")
        if any(not text for text in self.stop):
            raise RequestError("stop holds an empty string", param="stop")
        ids = self.stop_token_ids
        if not isinstance(ids, tuple) or not all(_is_token_id(token) for token in ids):
            raise _refused("stop_token_ids", ids, "a tuple of token ids")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids holds {len(ids)} tokens; at most {MAX_STOP_TOKEN_IDS}",
                param="stop_token_ids",
            )

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, tuple):
            raise _refused("logit_bias", self.logit_bias, "a tuple of (token id, bias) pairs")
        for pair in self.logit_bias:
            if not isinstance(pair, tuple) or len(pair) != 2 or not _is_token_id(pair[0]):
                raise _refused("logit_bias", pair, "a token id and its bias")
            if type(pair[1]) not in (int, float) or not -100.0 <= pair[1] <= 100.0:
                raise _refused("logit_bias", pair, "a bias is a number from -100 to 100")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise RequestError("logit_bias names a token twice", param="logit_bias")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, image placeholders already expanded, and the pictures they stand for, in order.

    The last `num_suffix_tokens` are the chat template's generation suffix; the next turn of the
    conversation may not repeat them. `key_ids`: see `prefix_keys`; None lets the engine make them.
    """

    token_ids: tuple[int, ...]
    images: tuple["Patches", ...] = field(default=())
    num_suffix_tokens: int = 0
    key_ids: tuple[int, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of the model's own probability: before bias, penalties, temperature."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's, and the likeliest tokens' in falling order (ties: lower id first)."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token and the text that became certain with it.

    `token_id` is None only in the last event of an aborted reply. `is_own_end`: one of the model's
    own end tokens ended the reply, and no stop that the caller named.
    """

    token_id: int | None
    text: str
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    is_own_end: bool = False


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """What a step of the engine gave one request: an event, or the error that ended it.

    num_cached: prompt tokens that were not computed again because a snapshot held them.
    """

    request_id: int
    event: TokenEvent | None
    error: Exception | None = None
    num_cached: int = 0

    def __post_init__(self) -> None:
        assert (self.event is None) != (self.error is None), "exactly one of event and error"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the engine holds now, and counters since its start."""

    num_running: int
    num_waiting: int
    pages_used: int
    pages_total: int
    snapshots_used: int
    snapshots_total: int
    num_preemptions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    steps: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished reply. `reasoning` is set for chats whose reply began with a thought.

    num_cached_tokens: of the prompt, from a snapshot. `logprobs`: one per token, when asked for.
    is_own_end: as of the last TokenEvent.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason
    num_prompt_tokens: int
    reasoning: str | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    is_own_end: bool = False


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID


def _refused(name: str, value: object, wanted: str) -> RequestError:
    shown = value if isinstance(value, int | float) else repr(value)
    return RequestError(f"{name} is {shown}; {wanted}", param=name)
