"""A plain loop over the cached forward pass: one request at a time, prefill in chunks, then decode.

It stands behind the names the full engine will keep (prefill, decode, TokenEvent).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from emberbox.chat.detokenizer import Detokenizer
from emberbox.engine.request import FinishReason, Prompt, SamplingParams, TokenEvent
from emberbox.engine.sampler import Sampler
from emberbox.engine.token_reader import TokenReader
from emberbox.errors import ContextLengthError, EnvironmentProblem, RequestError
from emberbox.model.batch import Batch, SequenceRows
from emberbox.model.cache import CacheSize
from emberbox.model.config import PAGE_TOKENS
from emberbox.model.network import Network

PREFILL_CHUNK = 512  # rows per forward pass; an abort waits for one of them at most


class EngineLoop:
    """Owns a network and the cache of one sequence."""

    def __init__(self, network: Network, *, max_model_len: int) -> None:
        self.network, self.max_model_len = network, max_model_len
        self.device = network.embedding.device
        self.pages = tuple(range(-(-max_model_len // PAGE_TOKENS)))
        size = CacheSize(num_pages=len(self.pages), num_slots=1)
        try:
            self.cache = network.new_cache(size)
        except RuntimeError as error:  # torch's word for memory that cannot be had
            raise EnvironmentProblem(
                f"no memory for a cache of {max_model_len} tokens: {error}",
                hint="ask for a smaller max_model_len",
            ) from error
        self._turn = object()

    def check(self, prompt: Prompt, params: SamplingParams) -> int:
        """The number of tokens the reply may have. Raises RequestError before any work."""
        self.check_tokens(prompt)
        num_prompt = len(prompt.token_ids)
        room = self.max_model_len - num_prompt
        wanted = params.max_tokens if params.max_tokens is not None else max(room, 1)
        if wanted > room:
            raise ContextLengthError(
                f"the context holds {self.max_model_len} tokens; the prompt has {num_prompt} and "
                f"the reply may have {wanted}, {num_prompt + wanted} in all",
                param="messages",
                hint=f"shorten the prompt or ask for at most {max(room, 0)} tokens",
            )
        return wanted

    def check_tokens(self, prompt: Prompt) -> None:
        """Raises RequestError for an empty prompt or a token id the model does not know."""
        if not prompt.token_ids:
            raise RequestError("the prompt holds no tokens", param="prompt")
        vocab = self.network.config.text.vocab_size
        for at, token in enumerate(prompt.token_ids):
            if not 0 <= token < vocab:
                raise RequestError(
                    f"token {token} at position {at} is outside the vocabulary of {vocab}",
                    param="prompt",
                )

    def hidden(self, prompt: Prompt, chunk: int = PREFILL_CHUNK) -> Iterator[Tensor]:
        """Prefill: hidden states [n, hidden] of successive chunks of the prompt."""
        return self._prefill(self._begin(), prompt, chunk)

    def run(
        self,
        prompt: Prompt,
        params: SamplingParams,
        detokenizer: Detokenizer,
        should_abort: Callable[[], bool] = lambda: False,
    ) -> Iterator[TokenEvent]:
        """Events of one reply; the last one carries a finish reason.

        `should_abort` is asked after each forward pass. Raises RequestError when another prompt
        began before this one's end.
        """
        reader = TokenReader(params, detokenizer, self._eos(params), self.check(prompt, params))
        turn, position = self._begin(), len(prompt.token_ids)
        hidden = None
        for chunk in self._prefill(turn, prompt, PREFILL_CHUNK):
            hidden = chunk
            if should_abort():
                yield TokenEvent(None, "", FinishReason.ABORT)
                return
        while hidden is not None:
            token = self._sample(reader.sampler, hidden)
            event = reader.accept(token)
            yield event
            if event.finish is not None:
                return
            if should_abort():
                yield TokenEvent(None, "", FinishReason.ABORT)
                return
            hidden = self._forward(turn, SequenceRows((token,), position, 0, self.pages))
            position += 1

    def _eos(self, params: SamplingParams) -> tuple[int, ...]:
        return () if params.ignore_eos else self.network.config.text.eos_token_ids

    def _begin(self) -> object:
        """A new turn: the cache is this prompt's from now on, and no longer any other's."""
        self._turn = object()
        return self._turn

    @torch.inference_mode()
    def _prefill(self, turn: object, prompt: Prompt, chunk: int) -> Iterator[Tensor]:
        features = self._image_features(prompt)
        for start in range(0, len(prompt.token_ids), chunk):
            ids = prompt.token_ids[start : start + chunk]
            here = {i - start: f for i, f in features.items() if start <= i < start + len(ids)}
            yield self._forward(turn, SequenceRows(ids, start, 0, self.pages, features=here))

    @torch.inference_mode()
    def _forward(self, turn: object, rows: SequenceRows) -> Tensor:
        if self._turn is not turn:
            raise RequestError(
                "another prompt took the cache before this one's end",
                hint="read one stream or score to its end before the next begins",
            )
        return self.network.forward(Batch.of([rows], self.device), self.cache)

    @torch.inference_mode()
    def _sample(self, sampler: Sampler, hidden: Tensor) -> int:
        return sampler.sample(self.network.logits(hidden[-1]))

    def _image_features(self, prompt: Prompt) -> dict[int, Tensor]:
        """Position in the prompt -> embedding, for every image token."""
        image = self.network.config.image_token_id
        places = [at for at, token in enumerate(prompt.token_ids) if token == image]
        if not places and not prompt.images:
            return {}
        if self.network.vision is None:
            raise RequestError("this checkpoint has no vision tower; send no images")
        grids = [patches.grid for patches in prompt.images]
        pixels = [torch.from_numpy(p.pixel_values).to(self.device) for p in prompt.images]
        dtype = self.network.embedding.dtype
        features = self.network.vision(torch.cat(pixels).to(dtype), grids) if pixels else ()
        if len(features) != len(places):
            raise RequestError(
                f"the prompt has {len(places)} image tokens, its images make {len(features)}"
            )
        return dict(zip(places, features, strict=True))
