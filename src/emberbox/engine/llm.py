"""`LLM`: a checkpoint, ready to be asked from Python.

llm = LLM("models/ember-nano")
print(llm.chat([{"role": "user", "content": "Count from 3 to 9."}]).text)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from operator import index
from pathlib import Path

import torch
from torch import Tensor

from emberbox.chat.detokenizer import Detokenizer
from emberbox.chat.parser import split_reasoning
from emberbox.chat.prompt import ChatFormat
from emberbox.device import Device
from emberbox.engine.agreement import check_agreement
from emberbox.engine.loop import EngineLoop
from emberbox.engine.request import Completion, FinishReason, Prompt, SamplingParams, TokenEvent
from emberbox.errors import ContextLengthError, RequestError, SettingsError
from emberbox.model.config import Glm5NextConfig
from emberbox.model.network import Network
from emberbox.model.weights import assign, load_parameters
from emberbox.ops.table import bind_all
from emberbox.settings import DTYPES
from emberbox.store.checkpoint import open_checkpoint

SCORE_CHUNK = 512


class LLM:
    """Loads a checkpoint folder strictly and answers from it.

    dtype "auto" is float32 on a CPU, bfloat16 on a GPU; max_model_len None is the model's own
    context. Raises CheckpointError (every reason named) or SettingsError before anything is served.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
    ) -> None:
        if not str(path):
            raise SettingsError("path is empty; the folder of a checkpoint")
        folder = Path(path)
        found = Device.detect(device)
        self.device = torch.device(found.torch_name)
        self.dtype = _dtype(dtype, self.device)
        checkpoint = open_checkpoint(folder)
        self.config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
        self.max_model_len = _context(max_model_len, self.config.text.max_position_embeddings)
        self.folder = folder
        assignment = assign(self.config, checkpoint.tensors)
        params = load_parameters(checkpoint, assignment, device=self.device, dtype=self.dtype)
        self.ops = bind_all(self.device, found.capability or (0, 0))
        self.network = Network(self.config, params, self.ops)
        self.loop = EngineLoop(self.network, max_model_len=self.max_model_len)
        self.model_id = folder.resolve().name

    @cached_property
    def format(self) -> ChatFormat:
        """Tokenizer, template, pictures; read when text is first needed. Raises CheckpointError."""
        chat = ChatFormat.open(self.folder)
        check_agreement(self.config, chat, str(self.folder))
        return chat

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
        )
        return Prompt(tuple(token_ids), tuple(images))

    def check(self, prompt: Prompt, params: SamplingParams) -> int:
        """Tokens the reply may have. Raises RequestError or ContextLengthError before any work."""
        return self.loop.check(prompt, params)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        should_abort: Callable[[], bool] = lambda: False,
    ) -> Iterator[TokenEvent]:
        """Events of one reply, as they come. One reply at a time."""
        tokenizer = self.format.tokenizer
        detokenizer = Detokenizer(tokenizer, keep=tokenizer.markup_ids)
        return self.loop.run(prompt, params, detokenizer, should_abort)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in order. A prompt is text or token ids."""
        params = params or SamplingParams(max_tokens=256)
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        items = [prompts] if single else list(prompts)
        ready = [self.prepare(item) for item in items]  # type: ignore[arg-type]  # narrowed above
        for prompt in ready:
            self.check(prompt, params)
        return [self.complete(prompt, params) for prompt in ready]

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        reasoning_effort: str | None = None,
        enable_thinking: bool | None = None,
    ) -> Completion:
        """The assistant's next turn, its reasoning apart from its text."""
        prompt = self.prepare_chat(
            messages,
            tools=tools,
            reasoning_effort=reasoning_effort,
            enable_thinking=enable_thinking,
        )
        done = self.complete(prompt, params or SamplingParams())
        reasoning, text = split_reasoning(
            done.text,
            thinking=self.starts_in_reasoning(prompt),
            stopped_by_itself=done.finish is FinishReason.STOP,
        )
        return replace(done, text=text, reasoning=reasoning)

    def starts_in_reasoning(self, prompt: Prompt) -> bool:
        """Whether the prompt leaves the reply inside its thought."""
        return prompt.token_ids[-1] == self.format.tokenizer.special_id("<think>")

    def complete(self, prompt: Prompt, params: SamplingParams) -> Completion:
        """Run one prompt to its end."""
        events = list(self.stream(prompt, params))
        return Completion(
            text="".join(event.text for event in events),
            token_ids=tuple(e.token_id for e in events if e.token_id is not None),
            finish=events[-1].finish or FinishReason.STOP,
            num_prompt_tokens=len(prompt.token_ids),
        )

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int], *, chunk: int = SCORE_CHUNK) -> Iterator[Tensor]:
        """Logits of each position, float32 [n, vocab], n <= chunk at a time.

        Row t are the logits for token t + 1. Memory does not grow with the document beyond its
        cache.
        """
        if chunk < 1:
            raise SettingsError(f"score: chunk is {chunk}; at least 1")
        prompt = Prompt(tuple(token_ids))
        if len(prompt.token_ids) > self.max_model_len:
            raise ContextLengthError(
                f"{len(prompt.token_ids)} tokens, the context holds {self.max_model_len}"
            )
        self.loop.check_tokens(prompt)
        for hidden in self.loop.hidden(prompt, chunk):
            yield self.network.logits(hidden)

    def score_all(self, token_ids: Sequence[int]) -> Tensor:
        """All of score() in one float32 tensor [T, vocab], for small inputs."""
        return torch.cat(list(self.score(token_ids)))


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name not in DTYPES:
        raise SettingsError(f"dtype is {name!r}; one of {', '.join(DTYPES)}")
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if name == "float32" else torch.bfloat16


def _context(wanted: int | None, most: int) -> int:
    if wanted is None:
        return most
    if not 1 <= wanted <= most:
        raise SettingsError(f"max_model_len is {wanted}; the model holds 1..{most}")
    return wanted
