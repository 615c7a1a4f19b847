"""`LLM`: a checkpoint, ready to be asked from Python.

llm = LLM("models/ember-nano")
print(llm.chat([{"role": "user", "content": "Count from 3 to 9."}]).text)
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import count
from numbers import Integral
from operator import index
from pathlib import Path

import torch
from torch import Tensor

from emberbox.chat.detokenizer import Detokenizer
from emberbox.chat.parser import split_reasoning
from emberbox.chat.prompt import ChatFormat
from emberbox.engine.agreement import check_agreement
from emberbox.engine.core import Drafter, Engine
from emberbox.engine.loading import LoadListener, load
from emberbox.engine.pictures import PromptPictures
from emberbox.engine.prefix_keys import prefix_keys
from emberbox.engine.request import (
    Completion,
    EngineStats,
    FinishReason,
    Prompt,
    RequestEvent,
    SamplingParams,
    TokenEvent,
)
from emberbox.engine.score import hidden_states
from emberbox.errors import ContextLengthError, RequestError, SettingsError
from emberbox.settings import EngineSettings

SCORE_CHUNK = 512
ASSISTANT = "<|assistant|>"
MAX_SUFFIX_TOKENS = 4  # the marker, and a thought that is opened and perhaps closed


class LLM:
    """Loads a checkpoint folder strictly and answers from it.

    Of the settings, dtype "auto" is float32 on a CPU, bfloat16 on a GPU; max_model_len None is the
    model's own context, or what fits. `drafter` guesses tokens that the network then verifies; the
    replies are the same with any. `listener` hears of the load. For use from one thread. Raises
    CheckpointError (every reason named), SettingsError or MemoryRefused before anything is served.
    """

    def __init__(
        self,
        path: str | Path,
        settings: EngineSettings | None = None,
        *,
        drafter: Drafter | None = None,
        listener: LoadListener | None = None,
    ) -> None:
        if not str(path):
            raise SettingsError("path is empty; the folder of a checkpoint")
        settings = settings or EngineSettings()
        self.folder = Path(path)
        loaded = load(self.folder, settings, listener)
        self.network, self.memory = loaded.network, loaded.memory
        self.config, self.device = self.network.config, self.network.embedding.device
        self.engine = Engine(self.network, self.memory, self._detokenizer, drafter=drafter)
        self.max_model_len = self.memory.max_model_len
        self.model_id = self.folder.resolve().name
        self._ids = count()
        self._mail: dict[int, deque[RequestEvent]] = {}

    @cached_property
    def format(self) -> ChatFormat:
        """Tokenizer, template, pictures; read when text is first needed. Raises CheckpointError."""
        chat = ChatFormat.open(self.folder)
        check_agreement(self.config, chat, str(self.folder))
        return chat

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.engine.has_work

    def prepare(self, prompt: str | Sequence[int]) -> Prompt:
        """Text (its special-token strings are special) or token ids -> Prompt."""
        if isinstance(prompt, str):
            return Prompt(tuple(self.format.tokenizer.encode_template(prompt)))
        if any(isinstance(token, bool) for token in prompt):
            raise RequestError("a token id is true or false; an integer", param="prompt")
        return Prompt(tuple(index(token) for token in prompt))

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        reasoning_effort: str | None = None,
        enable_thinking: bool | None = None,
        clear_thinking: bool | None = None,
    ) -> Prompt:
        """OpenAI-shaped messages -> Prompt. Raises RequestError naming the message at fault."""
        token_ids, images = self.format.encode(
            messages,
            tools=tools,
            reasoning_effort=reasoning_effort,
            enable_thinking=enable_thinking,
            clear_thinking=clear_thinking,
            max_tokens=self.max_model_len,
        )
        keys = prefix_keys(token_ids, images, self.config.image_token_id)
        return Prompt(tuple(token_ids), tuple(images), self._num_suffix(token_ids), keys)

    def check(self, prompt: Prompt, params: SamplingParams) -> int:
        """Tokens the reply may have. Raises RequestError or ContextLengthError before any work."""
        return self.engine.check(prompt, params)

    def submit(self, request_id: int, prompt: Prompt, params: SamplingParams) -> None:
        """Hand a request to the engine; `step` gives its events. For who drives it step by step."""
        self.engine.submit(request_id, prompt, params)

    def abort(self, request_id: int) -> None:
        """End a request without an event; one that has ended already is ignored."""
        self.engine.abort(request_id)

    def step(self) -> list[RequestEvent]:
        """One step of all requests."""
        return self.engine.step()

    def stats(self) -> EngineStats:
        """What the engine holds, and its counters."""
        return self.engine.stats()

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token alone, as text and as bytes; special tokens are shown."""
        return self._token_text(token_id)

    def reply_bytes(self, token_id: int) -> bytes:
        """What a token adds to a reply's text: nothing for a special token that is not shown."""
        tokenizer = self.format.tokenizer
        return tokenizer.token_bytes(token_id, keep=tokenizer.markup_ids)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        should_abort: Callable[[], bool] = lambda: False,
    ) -> Iterator[TokenEvent]:
        """Events of one reply, as they come; several streams may be read in turn.

        `should_abort` is asked before each step. A stream that is closed early is aborted.
        """
        params = params or SamplingParams()
        (request_id,) = self._submit_all([prompt], params)
        try:
            while True:
                if should_abort():
                    yield TokenEvent(None, "", FinishReason.ABORT)
                    return
                for event in self._next_events(request_id):
                    yield event
                    if event.finish is not None:
                        return
        finally:
            self._forget(request_id)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in order, computed together. A prompt is text or token ids."""
        params = params or SamplingParams(max_tokens=256)
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        items = [prompts] if single else list(prompts)
        return self.complete_all([self.prepare(item) for item in items], params)  # type: ignore[arg-type]  # narrowed above

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        reasoning_effort: str | None = None,
        enable_thinking: bool | None = None,
        clear_thinking: bool | None = None,
    ) -> Completion:
        """The assistant's next turn, its reasoning apart from its text."""
        prompt = self.prepare_chat(
            messages,
            tools=tools,
            reasoning_effort=reasoning_effort,
            enable_thinking=enable_thinking,
            clear_thinking=clear_thinking,
        )
        done = self.complete(prompt, params or SamplingParams())
        reasoning, text = split_reasoning(
            done.text,
            thinking=self.starts_in_reasoning(prompt),
            stopped_by_itself=done.is_own_end,
        )
        return replace(done, text=text, reasoning=reasoning)

    def starts_in_reasoning(self, prompt: Prompt) -> bool:
        """Whether the prompt leaves the reply inside its thought."""
        return prompt.token_ids[-1] == self.format.tokenizer.special_id("<think>")

    def complete(self, prompt: Prompt, params: SamplingParams) -> Completion:
        """Run one prompt to its end."""
        return self.complete_all([prompt], params)[0]

    def complete_all(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """Run prompts to their ends, together. Raises what ended one of them, aborts the rest."""
        ids = self._submit_all(prompts, params)
        try:
            return [
                self._completion(request_id, prompt)
                for request_id, prompt in zip(ids, prompts, strict=True)
            ]
        finally:
            for request_id in ids:
                self._forget(request_id)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int], *, chunk: int = SCORE_CHUNK) -> Iterator[Tensor]:
        """Logits of each position, float32 [n, vocab], n <= chunk at a time.

        Row t are the logits for token t + 1. Memory does not grow with the document beyond a cache
        of its own.
        """
        for hidden in self.hidden(Prompt(tuple(token_ids)), chunk=chunk):
            yield self.network.logits(hidden)

    def score_all(self, token_ids: Sequence[int]) -> Tensor:
        """All of score() in one float32 tensor [T, vocab], for small inputs."""
        return torch.cat(list(self.score(token_ids)))

    def hidden(self, prompt: Prompt, *, chunk: int = SCORE_CHUNK) -> Iterator[Tensor]:
        """Hidden states after the final norm, [n, hidden], n <= chunk at a time.

        Beside the engine, with a cache of its own that holds this prompt.
        """
        if chunk < 1:
            raise SettingsError(f"score: chunk is {chunk}; at least 1")
        if len(prompt.token_ids) > self.max_model_len:
            raise ContextLengthError(
                f"{len(prompt.token_ids)} tokens, the context holds {self.max_model_len}"
            )
        self.engine.check_prompt(prompt)
        pictures = PromptPictures(prompt.token_ids, prompt.images, self.config.image_token_id)
        features = pictures.rows(self.engine.runner.encode, 0, len(prompt.token_ids))
        kept = self.memory.latent_dtype
        ids = prompt.token_ids
        return hidden_states(self.network, ids, features, chunk=chunk, latent_dtype=kept)

    @cached_property
    def _token_text(self) -> Callable[[int], tuple[str, bytes]]:
        tokenizer = self.format.tokenizer
        every = frozenset(tokenizer.special_tokens.values())

        @lru_cache(maxsize=65536)
        def text(token_id: int) -> tuple[str, bytes]:
            data = tokenizer.token_bytes(token_id, keep=every)
            return data.decode("utf-8", "replace"), data

        return text

    def _detokenizer(self) -> Detokenizer:
        tokenizer = self.format.tokenizer
        return Detokenizer(tokenizer, keep=tokenizer.markup_ids)

    def _num_suffix(self, token_ids: Sequence[int]) -> int:
        """Tokens from the last assistant marker on, where the template just asked for a reply."""
        marker = self.format.tokenizer.special_tokens.get(ASSISTANT)
        tail = list(token_ids[-MAX_SUFFIX_TOKENS:])
        return len(tail) - tail.index(marker) if marker in tail else 0

    def _submit_all(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[int]:
        for prompt in prompts:
            self.check(prompt, params)
        ids: list[int] = []
        try:
            for prompt in prompts:
                ids.append(next(self._ids))
                self.engine.submit(ids[-1], prompt, params)
                self._mail[ids[-1]] = deque()
        except BaseException:
            for request_id in ids:
                self._forget(request_id)
            raise
        return ids

    def _next_mail(self, request_id: int) -> RequestEvent:
        """The request's next event; steps of the engine serve all that are under way."""
        mail = self._mail[request_id]
        while not mail:
            if not self.engine.knows(request_id):
                raise RequestError("the reply was given up: a step of the engine failed")
            for event in self.engine.step():
                if event.request_id in self._mail:
                    self._mail[event.request_id].append(event)
        return mail.popleft()

    def _next_events(self, request_id: int) -> Iterator[TokenEvent]:
        """What there is now, after one step if need be."""
        yield self._event(self._next_mail(request_id))
        while self._mail[request_id]:
            yield self._event(self._mail[request_id].popleft())

    def _event(self, mail: RequestEvent) -> TokenEvent:
        if mail.error is not None:
            raise mail.error
        assert mail.event is not None, "an event or an error"
        return mail.event

    def _completion(self, request_id: int, prompt: Prompt) -> Completion:
        mails = [self._next_mail(request_id)]
        while mails[-1].event is not None and mails[-1].event.finish is None:
            mails.append(self._next_mail(request_id))
        events = [self._event(mail) for mail in mails]
        return Completion(
            text="".join(event.text for event in events),
            token_ids=tuple(e.token_id for e in events if e.token_id is not None),
            finish=events[-1].finish or FinishReason.STOP,
            num_prompt_tokens=len(prompt.token_ids),
            num_cached_tokens=mails[0].num_cached,
            logprobs=tuple(e.logprobs for e in events if e.logprobs is not None),
            is_own_end=events[-1].is_own_end,
        )

    def _forget(self, request_id: int) -> None:
        self._mail.pop(request_id, None)
        self.engine.abort(request_id)
