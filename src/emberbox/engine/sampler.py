"""From the network's logits to a token, for one request.

Order: log-probabilities (of the raw logits), logit bias, repetition penalty, presence and frequency
penalties, the ban of end tokens, temperature, top-k, top-p, min-p, the draw. Token number i is
drawn with one uniform number that depends on (seed, i) alone, so neither drafts nor batches nor
other requests change what is drawn. Knows no text.

V is the vocabulary. All arithmetic is float64 on the logits' own device.
"""

import copy
import math
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from emberbox.engine.request import SamplingParams, TokenLogprob, TokenLogprobs

_UINT64 = 2**64
# Scores stay finite under any penalty, so that differences of scores do too.
_MAX_SCORE = 1e300


class Sampler:
    """Chooses the tokens of one reply, in order, and remembers what its penalties need."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
    ) -> None:
        """`stop_ids`: every token that ends the reply; banned in its first min_tokens tokens."""
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.num_tokens = 0
        self._prompt_ids, self._stop_ids = prompt_ids, list(stop_ids)
        # Made at the first row, when device and vocabulary are known; nothing is rebuilt per token.
        self._bias: Tensor | None = None  # [V] float64
        self._counts: Tensor | None = None  # [V] float64, of reply tokens
        self._is_seen: Tensor | None = None  # [V] bool, in prompt or reply

    @torch.inference_mode()
    def sample(self, logits: Tensor, greedy: int) -> tuple[int, TokenLogprobs | None]:
        """The next token and what `logprobs` asks for. `greedy`: argmax.

        logits [V], not modified; the engine has seen that they are finite.
        """
        params, token = self.params, greedy
        if params.temperature != 0:
            uniform = uniform_of(self.seed, self.num_tokens)
            token = draw(self.scores(logits), params, uniform)
        elif params.changes_logits:
            token = int(self.scores(logits).argmax())
        self._remember(token)
        if params.logprobs is None:
            return token, None
        return token, logprobs_of(logits, token, params.logprobs)

    @torch.inference_mode()
    def scores(self, logits: Tensor) -> Tensor:
        """logits [V] -> float64 [V] after bias, penalties and the ban; temperature comes next."""
        params, scores = self.params, logits.to(torch.float64, copy=True)
        if params.logit_bias:
            scores += self._bias_on(scores)
        if params.repetition_penalty != 1:
            factor = params.repetition_penalty
            penalised = torch.where(scores > 0, scores / factor, scores * factor)
            scores = torch.where(self._seen_on(scores), penalised, scores)
            scores = scores.clamp(-_MAX_SCORE, _MAX_SCORE)
        if params.presence_penalty or params.frequency_penalty:
            counts = self._counts_on(scores)
            scores -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        if self.num_tokens < params.min_tokens and self._stop_ids:
            scores[self._stop_ids] = -math.inf
        return scores

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

    def _bias_on(self, scores: Tensor) -> Tensor:
        if self._bias is None:
            ids, values = zip(*self.params.logit_bias, strict=True)
            self._bias = torch.zeros_like(scores)
            self._bias[list(ids)] = scores.new_tensor(values)
        return self._bias

    def _counts_on(self, scores: Tensor) -> Tensor:
        if self._counts is None:
            self._counts = torch.zeros_like(scores)
        return self._counts

    def _seen_on(self, scores: Tensor) -> Tensor:
        if self._is_seen is None:
            self._is_seen = torch.zeros_like(scores, dtype=torch.bool)
            self._is_seen[list(self._prompt_ids)] = True
        return self._is_seen


def uniform_of(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits: Philox with key `seed` at counter `index`.

    Taken from the raw stream, which numpy promises never to change.
    """
    bits = int(np.random.Philox(key=seed % _UINT64, counter=index).random_raw())
    return (bits >> 11) * 2.0**-53


def draw(scores: Tensor, params: SamplingParams, uniform: float) -> int:
    """scores float64 [V] -> a token, by inverse CDF over the tokens in falling order of score.

    temperature > 0. Of equal scores the lower id comes first, at every cut.
    """
    # Shifted first: a tiny temperature must not overflow. The largest weight is exactly 1.
    scaled = (scores - scores.max()) / params.temperature
    ranked, order = scaled.sort(descending=True, stable=True)
    weights = ranked[: params.top_k or None].exp()
    cdf = weights.cumsum(0)
    # Each cut keeps a prefix of the ranking, so the smallest prefix is what all of them keep.
    # top-p: a token stays while those before it hold less than top_p; the first always stays.
    # Indices stay tensors [1]: reading one back would wait for the device.
    num_kept = 1 + (cdf[:-1] < params.top_p * cdf[-1]).sum(0, keepdim=True)
    num_kept = torch.minimum(num_kept, (weights >= params.min_p).sum(0, keepdim=True))
    target = uniform * cdf.take(num_kept - 1)
    index = torch.searchsorted(cdf, target, right=True)
    return int(order.take(torch.minimum(index, num_kept - 1)))


def logprobs_of(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of raw logits [V]: the token's and the `num_top` largest."""
    logprobs = logits.double().log_softmax(-1)
    chosen = TokenLogprob(token, float(logprobs[token]))
    if not num_top:
        return TokenLogprobs(chosen)
    values, ids = logprobs.sort(descending=True, stable=True)
    pairs = zip(ids[:num_top].tolist(), values[:num_top].tolist(), strict=True)
    return TokenLogprobs(chosen, tuple(TokenLogprob(i, value) for i, value in pairs))
