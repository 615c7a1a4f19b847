"""Sampling in plain torch, in float64, with a sort of the whole vocabulary."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Scores stay finite under any penalty, so that differences of scores do too.
MAX_SCORE = 1e300


class Cuts(NamedTuple):
    """Temperature (0: the best score), and who may be drawn. top_k 0, top_p 1, min_p 0: all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Changes(NamedTuple):
    """What makes scores of logits; what is None changes nothing. Tensors [V].

    bias and counts (of tokens in the reply) float64; is_seen (in prompt or reply) and is_banned
    bool. repetition divides scores above 0 of tokens seen and multiplies those below; presence and
    frequency are subtracted, once and for each time.
    """

    bias: Tensor | None = None
    is_seen: Tensor | None = None
    repetition: float = 1.0
    counts: Tensor | None = None
    presence: float = 0.0
    frequency: float = 0.0
    is_banned: Tensor | None = None


def sample_rows(logits: Tensor, uniforms: Sequence[float], cuts: Cuts, changes: Changes) -> Tensor:
    scores, cuts = scores_of(logits, changes), Cuts(*cuts)
    if cuts.temperature == 0:
        return scores.argmax(-1)
    rows = zip(scores, uniforms, strict=True)
    tokens = [drawn(row, cuts, uniform) for row, uniform in rows]
    return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64, device=logits.device)


def scores_of(logits: Tensor, changes: Changes) -> Tensor:
    """logits [..., V], not modified -> float64 scores; temperature comes next."""
    changes, scores = Changes(*changes), logits.to(torch.float64, copy=True)
    if changes.bias is not None:
        scores += changes.bias
    if changes.is_seen is not None:
        factor = changes.repetition
        penalised = torch.where(scores > 0, scores / factor, scores * factor)
        scores = torch.where(changes.is_seen, penalised, scores).clamp(-MAX_SCORE, MAX_SCORE)
    if changes.counts is not None:
        counts = changes.counts
        scores -= changes.presence * counts.sign() + changes.frequency * counts
    if changes.is_banned is not None:
        scores.masked_fill_(changes.is_banned, -math.inf)
    return scores


def drawn(scores: Tensor, cuts: Cuts, uniform: float) -> Tensor:
    """scores float64 [V] -> a token [1]. temperature > 0."""
    # Shifted first: a tiny temperature must not overflow. The largest weight is exactly 1.
    scaled = (scores - scores.max()) / cuts.temperature
    ranked, order = scaled.sort(descending=True, stable=True)
    weights = ranked[: cuts.top_k or None].exp()
    cdf = weights.cumsum(0)
    # Each cut keeps a prefix of the ranking, so the smallest prefix is what all of them keep.
    # top-p: a token stays while those before it hold less than top_p; the first always stays.
    # Indices stay tensors [1]: reading one back would wait for the device.
    num_kept = 1 + (cdf[:-1] < cuts.top_p * cdf[-1]).sum(0, keepdim=True)
    num_kept = torch.minimum(num_kept, (weights >= cuts.min_p).sum(0, keepdim=True))
    target = uniform * cdf.take(num_kept - 1)
    index = torch.searchsorted(cdf, target, right=True)
    return order.take(torch.minimum(index, num_kept - 1))
