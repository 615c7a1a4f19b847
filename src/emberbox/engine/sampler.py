"""From the network's logits to a token, for one request.

Order: log-probabilities (of the raw logits), logit bias, repetition penalty, presence and frequency
penalties, the ban of end tokens, temperature, top-k, top-p, min-p, the draw. Token number i is
drawn with one uniform number that depends on (seed, i) alone, so neither drafts nor batches nor
other requests change what is drawn. Knows no text.

V is the vocabulary. All arithmetic is float64 on the logits' own device (ops/sample_rows); a token
is all that is read back.
"""

import copy
import secrets
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from emberbox.engine.request import SamplingParams, TokenLogprob, TokenLogprobs
from emberbox.ops.sample_rows import Changes, Cuts, sample_rows
from emberbox.ops.sample_rows.reference import drawn, scores_of

_UINT64 = 2**64
Draws = Callable[[Tensor, Sequence[float], Cuts, Changes], Tensor]


class Sampler:
    """Chooses the tokens of one reply, in order, and remembers what its penalties need."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        draws: Draws = sample_rows,
    ) -> None:
        """`stop_ids`: every token that ends the reply; banned in its first min_tokens tokens.

        `draws`: the form of ops/sample_rows that runs where the logits are.
        """
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.num_tokens = 0
        self._prompt_ids, self._stop_ids, self._draws = prompt_ids, list(stop_ids), draws
        # Made at the first row, when device and vocabulary are known; nothing is rebuilt per token.
        self._bias: Tensor | None = None  # [V] float64
        self._counts: Tensor | None = None  # [V] float64, of reply tokens
        self._is_seen: Tensor | None = None  # [V] bool, in prompt or reply
        self._is_stop: Tensor | None = None  # [V] bool

    @torch.inference_mode()
    def sample(self, logits: Tensor, greedy: int) -> tuple[int, TokenLogprobs | None]:
        """The next token and what `logprobs` asks for. `greedy`: argmax.

        logits [V], not modified; the engine has seen that they are finite.
        """
        params, token = self.params, greedy
        if params.temperature != 0 or params.changes_logits:
            uniform = uniform_of(self.seed, self.num_tokens) if params.temperature else 0.0
            token = int(self._draws(logits[None], (uniform,), _cuts(params), self._changes(logits)))
        self._remember(token)
        if params.logprobs is None:
            return token, None
        return token, logprobs_of(logits, token, params.logprobs)

    @torch.inference_mode()
    def scores(self, logits: Tensor) -> Tensor:
        """logits [V] -> float64 [V] after bias, penalties and the ban; temperature comes next."""
        return scores_of(logits, self._changes(logits))

    def copy(self) -> "Sampler":
        """An independent sampler at the same point, with the same random numbers to come."""
        twin = copy.copy(self)
        twin._counts = None if self._counts is None else self._counts.clone()
        twin._is_seen = None if self._is_seen is None else self._is_seen.clone()
        return twin

    def _remember(self, token: int) -> None:
        self.num_tokens += 1
        if self._counts is not None:
            self._counts[token] += 1
        if self._is_seen is not None:
            self._is_seen[token] = True

    def _changes(self, logits: Tensor) -> Changes:
        """What the parameters and the tokens so far make of logits [V]."""
        params = self.params
        has_counts = params.presence_penalty or params.frequency_penalty
        is_early = self.num_tokens < params.min_tokens
        return Changes(
            bias=self._bias_on(logits) if params.logit_bias else None,
            is_seen=self._seen_on(logits) if params.repetition_penalty != 1 else None,
            repetition=params.repetition_penalty,
            counts=self._counts_on(logits) if has_counts else None,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            is_banned=self._stops_on(logits) if is_early and self._stop_ids else None,
        )

    def _bias_on(self, logits: Tensor) -> Tensor:
        if self._bias is None:
            ids, values = zip(*self.params.logit_bias, strict=True)
            self._bias = torch.zeros_like(logits, dtype=torch.float64)
            self._bias[list(ids)] = self._bias.new_tensor(values)
        return self._bias

    def _counts_on(self, logits: Tensor) -> Tensor:
        if self._counts is None:
            self._counts = torch.zeros_like(logits, dtype=torch.float64)
        return self._counts

    def _seen_on(self, logits: Tensor) -> Tensor:
        if self._is_seen is None:
            self._is_seen = torch.zeros_like(logits, dtype=torch.bool)
            self._is_seen[list(self._prompt_ids)] = True
        return self._is_seen

    def _stops_on(self, logits: Tensor) -> Tensor:
        if self._is_stop is None:
            self._is_stop = torch.zeros_like(logits, dtype=torch.bool)
            self._is_stop[self._stop_ids] = True
        return self._is_stop


def uniform_of(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits: Philox with key `seed` at counter `index`.

    Taken from the raw stream, which numpy promises never to change.
    """
    bits = int(np.random.Philox(key=seed % _UINT64, counter=index).random_raw())
    return (bits >> 11) * 2.0**-53


def warm_up(draws: Draws, device: torch.device, vocab_size: int) -> None:
    """Compile what a draw needs on a device and take its memory, before anybody asks for one."""
    logits = torch.zeros(1, vocab_size, device=device)
    for cuts in (Cuts(), Cuts(temperature=1.0, top_p=0.9)):
        draws(logits, (0.5,), cuts, Changes())


def draw(scores: Tensor, params: SamplingParams, uniform: float) -> int:
    """scores float64 [V] -> a token, by inverse CDF over the tokens in falling order of score.

    temperature > 0. Of equal scores the lower id comes first, at every cut.
    """
    return int(drawn(scores, _cuts(params), uniform))


def logprobs_of(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of raw logits [V]: the token's and the `num_top` largest."""
    logprobs = logits.double().log_softmax(-1)
    chosen = TokenLogprob(token, float(logprobs[token]))
    if not num_top:
        return TokenLogprobs(chosen)
    values, ids = logprobs.sort(descending=True, stable=True)
    pairs = zip(ids[:num_top].tolist(), values[:num_top].tolist(), strict=True)
    return TokenLogprobs(chosen, tuple(TokenLogprob(i, value) for i, value in pairs))


def _cuts(params: SamplingParams) -> Cuts:
    return Cuts(params.temperature, params.top_k, params.top_p, params.min_p)
