"""An engine that says what it is told to, when it is told to. For tests of the server alone."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from emberbox.chat.messages import check_messages
from emberbox.engine.request import FinishReason, Prompt, SamplingParams, TokenEvent
from emberbox.errors import EmberboxError


class ScriptedEngine:
    """Replies with `script`, one piece per step. The prompt has one token per message letter."""

    model_id = "scripted"

    def __init__(self, script: Sequence[str] = ("</think>", "Hel", "lo"), length: int = 100):
        self.script = tuple(script)
        self.max_model_len = length
        self.finish = FinishReason.STOP
        self.fail_at: int | None = None
        self.failure: BaseException = EmberboxError("unset")
        self.gate = threading.Semaphore(0)
        self.is_gated = False
        self.num_steps = 0
        self.ends_without_token = False
        self.seen: list[tuple[Prompt, SamplingParams]] = []
        self.chats: list[tuple[Sequence[Mapping[str, object]], str | None, bool]] = []
        self.clear_thinking: list[bool | None] = []
        self.aborted = threading.Event()

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

    def stream(
        self, prompt: Prompt, params: SamplingParams, should_abort: Callable[[], bool]
    ) -> Iterator[TokenEvent]:
        self.seen.append((prompt, params))
        for i, text in enumerate(self.script):
            if should_abort():
                self.aborted.set()
                yield TokenEvent(-1, "", FinishReason.ABORT)
                return
            if self.is_gated:
                self.gate.acquire()
            if i == self.fail_at:
                raise self.failure
            self.num_steps += 1
            if i < len(self.script) - 1:
                yield TokenEvent(i, text)
            else:
                token_id = None if self.ends_without_token else i
                yield TokenEvent(token_id, text, self.finish)
