"""Engines for tests of the server alone: deterministic, in process, many requests at a time.

`BatchEngine` keeps the engine's protocol: slots, a queue, prefill in chunks, one token per running
request and step, aborts between steps. `ScriptedEngine` says what it is told to, when it is told
to. Both check that the thread rule is kept.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from emberbox.chat.messages import check_messages
from emberbox.chat.parser import StopMatcher
from emberbox.engine.request import (
    EngineStats,
    FinishReason,
    Prompt,
    RequestEvent,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    TokenLogprobs,
)
from emberbox.errors import ContextLengthError, EmberboxError, RequestError


@dataclass
class Running:
    """One request: its prompt still to read, and the tokens it has said."""

    request_id: int
    prompt: Prompt
    params: SamplingParams
    to_prefill: int
    num_said: int = 0
    num_cached: int = 0
    stops: StopMatcher = field(default_factory=lambda: StopMatcher([]))


class BatchEngine:
    """A continuous batch without a network; a subclass says which token comes next."""

    model_id = "scripted"
    vocab_size = 0x110000
    has_own_end = True  # False: a token of the request's ends the reply

    def __init__(self, *, length: int, num_slots: int = 8, prefill_tokens: int = 4096):
        self.max_model_len = length
        self.num_slots = num_slots
        self.prefill_tokens = prefill_tokens
        self.running: dict[int, Running] = {}
        self.waiting: dict[int, Running] = {}
        self.aborted: list[int] = []
        self.most_at_once = 0
        self.num_steps = self.num_generated = self.num_prompt = self.num_cached = 0
        self._thread: int | None = None

    # What a subclass says.

    def next_token(self, one: Running) -> tuple[int, str, bool]:
        """(token id, its text, whether the reply ends by itself with it)."""
        raise NotImplementedError

    # Any thread.

    def prepare(self, prompt: str | Sequence[int]) -> Prompt:
        return Prompt(tuple(map(ord, prompt)) if isinstance(prompt, str) else tuple(prompt))

    def check(self, prompt: Prompt, params: SamplingParams) -> int:
        if not prompt.token_ids:
            raise RequestError("the prompt holds no tokens", param="prompt")
        asked = [*prompt.token_ids, *params.stop_token_ids, *(t for t, _ in params.logit_bias)]
        for token in asked:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"token {token} is outside the vocabulary", param="prompt")
        room = self.max_model_len - len(prompt.token_ids)
        wanted = room if params.max_tokens is None else params.max_tokens
        if wanted > room or room < 1:
            raise ContextLengthError(f"{len(prompt.token_ids)} and {wanted} of {room}")
        return wanted

    def starts_in_reasoning(self, prompt: Prompt) -> bool:
        return True

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        return chr(token_id), chr(token_id).encode(errors="replace")

    def reply_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id)[1]

    # The engine thread.

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def submit(self, request_id: int, prompt: Prompt, params: SamplingParams) -> None:
        self._same_thread()
        assert request_id not in self.running | self.waiting
        one = Running(request_id, prompt, params, len(prompt.token_ids))
        one.stops = StopMatcher(params.stop)
        self.waiting[request_id] = one

    def abort(self, request_id: int) -> None:
        self._same_thread()
        if self.running.pop(request_id, None) is None:
            del self.waiting[request_id]  # an unknown id is a KeyError
        self.aborted.append(request_id)

    def step(self) -> list[RequestEvent]:
        self._same_thread()
        assert self.has_work, "a step without work"
        self.num_steps += 1
        while self.waiting and len(self.running) < self.num_slots:
            one = self.waiting.pop(next(iter(self.waiting)))
            self.running[one.request_id] = one
            self.num_prompt += len(one.prompt.token_ids)
            self.num_cached += one.num_cached
        self.most_at_once = max(self.most_at_once, len(self.running))
        events, budget = [], self.prefill_tokens
        for one in tuple(self.running.values()):
            read = min(one.to_prefill, budget)
            one.to_prefill, budget = one.to_prefill - read, budget - read
            if not one.to_prefill:
                events.append(self._say(one))
        return events

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            pages_used=len(self.running),
            pages_total=100,
            snapshots_used=0,
            snapshots_total=10,
            num_preemptions=0,
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_cached,
            generated_tokens=self.num_generated,
            drafted_tokens=0,
            accepted_tokens=0,
            steps=self.num_steps,
        )

    def _say(self, one: Running) -> RequestEvent:
        try:
            token_id, text, is_end = self.next_token(one)
        except Exception as error:
            del self.running[one.request_id]
            return RequestEvent(one.request_id, None, error)
        one.num_said += 1
        self.num_generated += 1
        text = one.stops.push(text)
        finish = FinishReason.STOP if is_end or one.stops.matched is not None else None
        if finish is None and one.num_said == one.params.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            text += one.stops.finish()
            del self.running[one.request_id]
        is_own_end = is_end and self.has_own_end and one.stops.matched is None
        event = TokenEvent(token_id, text, finish, self._logprobs(one, token_id), is_own_end)
        return RequestEvent(one.request_id, event, None, one.num_cached)

    def _logprobs(self, one: Running, token_id: int) -> TokenLogprobs | None:
        """Falling by a half from the chosen token on; the last alternative is impossible."""
        count = one.params.logprobs
        if count is None:
            return None
        top = [TokenLogprob(token_id + i, -0.5 * (i + 1)) for i in range(count)]
        if count > 1:
            top[-1] = TokenLogprob(token_id + count - 1, float("-inf"))
        return TokenLogprobs(TokenLogprob(token_id, -0.5), tuple(top))

    def _same_thread(self) -> None:
        self._thread = self._thread or threading.get_ident()
        assert self._thread == threading.get_ident(), "the engine thread alone may do this"


class ScriptedEngine(BatchEngine):
    """Replies with `script`, one piece per step. The prompt has one token per message letter."""

    def __init__(
        self,
        script: Sequence[str] = ("</think>", "Hel", "lo"),
        length: int = 100,
        **batch: int,
    ):
        super().__init__(length=length, **batch)
        self.script = tuple(script)
        self.finish = FinishReason.STOP
        self.fail_at: int | None = None
        self.failure: Exception = EmberboxError("unset")
        self.step_failure: BaseException | None = None  # raised by step() itself
        self.fails_when = lambda prompt: True
        self.gate = threading.Semaphore(0)
        self.is_gated = False
        self.cached_tokens = 0
        self.ends_without_token = False
        self.seen: list[tuple[Prompt, SamplingParams]] = []
        self.chats: list[tuple[Sequence[Mapping[str, object]], str | None, bool]] = []
        self.clear_thinking: list[bool | None] = []

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        reasoning_effort: str | None = None,
        enable_thinking: bool | None = None,
        clear_thinking: bool | None = None,
    ) -> Prompt:
        self.chats.append((messages, reasoning_effort, enable_thinking))
        self.clear_thinking.append(clear_thinking)
        checked = check_messages(messages).messages
        return Prompt(tuple(range(sum(len(str(message["content"])) for message in checked))))

    def submit(self, request_id: int, prompt: Prompt, params: SamplingParams) -> None:
        self.seen.append((prompt, params))
        super().submit(request_id, prompt, params)
        self.waiting[request_id].num_cached = self.cached_tokens

    def step(self) -> list[RequestEvent]:
        if self.is_gated:
            self.gate.acquire()
        if self.step_failure is not None:
            raise self.step_failure
        return super().step()

    def next_token(self, one: Running) -> tuple[int | None, str, bool]:
        i, last = one.num_said, len(self.script) - 1
        if i == self.fail_at and self.fails_when(one.prompt):
            raise self.failure
        is_end = i == last and self.finish is FinishReason.STOP
        if i == last and not is_end:
            one.params = SamplingParams(max_tokens=last + 1)
        token_id = None if i == last and self.ends_without_token else i
        return token_id, self.script[i], is_end
