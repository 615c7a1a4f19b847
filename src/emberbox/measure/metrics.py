"""How far one set of logits is from another, position by position, over the whole vocabulary.

With a, b the logits of reference and candidate, each less its row's maximum, Z their sums of exp:
  KL(reference || candidate) = sum e^a (a - b) / Z_a - (log Z_a - log Z_b)
Terms and sums are float64. A sum is taken by halves, in an order that depends on the vocabulary
alone: not on how many rows are given at once, nor on the device. Knows no model and no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberbox.errors import MeasureError

METRIC_VERSION = 1
TOP_K = 5
# Columns in float64 at once. Part of the order of the sums: changing it is a new METRIC_VERSION.
VOCABULARY_BLOCK = 8192
# Rows at once: a block of 128 x 8,192 in float64 is 8 MiB. Bounds memory; changes no bit.
ROWS = 128
# Less than this is no rounding: that gave -1.3e-15 at most (154,880 random logits times 1 + 1e-8).
MIN_KL = -1e-9

# n positions, V vocabulary, W columns of a block


@dataclass(frozen=True, slots=True)
class Positions:
    """Arrays of length n. Divergences and negative log-likelihoods in nats, float64.

    top1: both have the same best token (of equal logits the lowest id). top5: how many of the
    reference's five best are among the candidate's. finite: no logit of either is NaN or infinite;
    where one is, top1 is False, top5 0 and the rest NaN, to be counted and never averaged in.
    A divergence of equal distributions may come out a rounding below 0 (1e-15 and less) and is kept
    so: nothing is clamped.
    """

    kl: NDArray[np.float64]
    reverse_kl: NDArray[np.float64]
    reference_nll: NDArray[np.float64]
    candidate_nll: NDArray[np.float64]
    top1: NDArray[np.bool_]
    top5: NDArray[np.uint8]
    finite: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.kl)

    @classmethod
    def join(cls, pieces: Sequence["Positions"]) -> "Positions":
        """One after another."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(p, name) for p in pieces]) for name in names))


def position_metrics(
    reference_logits: Tensor, candidate_logits: Tensor, targets: Tensor
) -> Positions:
    """Logits [n, V] float32 and the tokens that came next [n] int64, on one device.

    Beyond them takes about eight blocks of ROWS x VOCABULARY_BLOCK in float64. Raises MeasureError
    for other shapes or dtypes, for a target outside the vocabulary, and for a divergence that is
    negative beyond rounding (which would be a bug).
    """
    _check(reference_logits, candidate_logits, targets)
    blocks = [slice(i, i + ROWS) for i in range(0, len(targets), ROWS)]
    pieces = [
        _block(reference_logits[rows], candidate_logits[rows], targets[rows])
        for rows in blocks or [slice(0, 0)]
    ]
    return Positions.join(pieces)


def _check(reference: Tensor, candidate: Tensor, targets: Tensor) -> None:
    shapes = f"{list(reference.shape)}, {list(candidate.shape)} and {list(targets.shape)}"
    fits = reference.shape == candidate.shape and reference.shape[:-1] == targets.shape
    if not fits or reference.dim() != 2 or not reference.shape[1]:
        raise MeasureError(f"logits and targets are {shapes}; expected [n, V], [n, V] and [n]")
    for name, logits in (("reference", reference), ("candidate", candidate)):
        if logits.dtype != torch.float32:
            raise MeasureError(f"{name} logits are {logits.dtype}, expected float32")
    if len(targets) and not (0 <= int(targets.min()) <= int(targets.max()) < reference.shape[1]):
        raise MeasureError(f"a target is outside the vocabulary of {reference.shape[1]}")


def _block(reference: Tensor, candidate: Tensor, targets: Tensor) -> Positions:
    """As position_metrics, of few rows."""
    finite = _is_finite(reference) & _is_finite(candidate)
    sums, best = _over_vocabulary(reference, candidate)
    log_z = sums[:2].log()
    difference = log_z[0] - log_z[1]
    kl = sums[2] / sums[0] - difference
    reverse = sums[3] / sums[1] + difference
    nll = [
        log_z[i] - (logits.gather(1, targets[:, None])[:, 0].double() - _maximum(logits)[:, 0])
        for i, logits in enumerate((reference, candidate))
    ]
    values = torch.stack([kl, reverse, *nll]).masked_fill(~finite, float("nan"))
    if bool((values[:2] < MIN_KL).any()):
        raise MeasureError(f"a divergence of {float(values[:2].nan_to_num().min())} was computed")
    shared = (best[0][:, :, None] == best[1][:, None, :]).sum((1, 2)) * finite
    top1 = (best[0][:, 0] == best[1][:, 0]) & finite
    flags = (top1, shared.to(torch.uint8), finite)
    return Positions(*values.cpu().numpy(), *(flag.cpu().numpy() for flag in flags))


def _over_vocabulary(reference: Tensor, candidate: Tensor) -> tuple[Tensor, list[Tensor]]:
    """[4, n] float64 sums of e^a, e^b, e^a (a - b) and e^b (b - a); best ids [n, k] of both."""
    tops = [_maximum(reference), _maximum(candidate)]
    partial, best = [], [_no_keys(reference), _no_keys(candidate)]
    for start in range(0, reference.shape[1], VOCABULARY_BLOCK):
        parts = [x[:, start : start + VOCABULARY_BLOCK] for x in (reference, candidate)]
        partial.append(_sum_by_halves(_terms(parts, tops)))
        best = [_better(old, part, start) for old, part in zip(best, parts, strict=True)]
    ids = [0xFFFFFFFF - (keys & 0xFFFFFFFF) for keys in best]
    return _sum_by_halves(torch.stack(partial, -1)), ids


def _terms(logits: Sequence[Tensor], tops: Sequence[Tensor]) -> Tensor:
    """What is summed, [4, n, W] float64; the logits [n, W] of both less `tops` [n, 1]."""
    terms = torch.empty(4, *logits[0].shape, dtype=torch.float64, device=logits[0].device)
    for i in range(2):
        torch.sub(logits[i], tops[i], out=terms[2 + i])
        torch.exp(terms[2 + i], out=terms[i])
    terms[2] -= terms[3]
    torch.neg(terms[2], out=terms[3])
    terms[2:] *= terms[:2]
    return terms


def _sum_by_halves(terms: Tensor) -> Tensor:
    """Sum over the last axis, pairwise; overwrites `terms`. Additions of whole slices alone: the
    order of those a reduction makes depends on shapes, threads and device."""
    width = terms.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        terms[..., : width - half] += terms[..., half:width]
        width = half
    return terms[..., 0]


def _maximum(logits: Tensor) -> Tensor:
    """[n, 1] float64."""
    return logits.amax(1, keepdim=True).double()


def _is_finite(logits: Tensor) -> Tensor:
    """[n] bool. A NaN is both extremes of its row."""
    return torch.isfinite(logits.amin(1)) & torch.isfinite(logits.amax(1))


def _no_keys(logits: Tensor) -> Tensor:
    return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)


def _better(best: Tensor, logits: Tensor, start: int) -> Tensor:
    """Keys [n, <= 5] of the best logits so far, largest first; `logits` [n, W] are of ids from
    `start`. A key orders by value and then by lower id: bits of the value above, ~id below."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    keys = bits.bitwise_xor((bits >> 31).bitwise_and_(0x7FFFFFFF)).long()
    ids = torch.arange(start, start + logits.shape[1], device=logits.device)
    keys = keys.bitwise_left_shift_(32).bitwise_or_(0xFFFFFFFF - ids)
    keys = keys.topk(min(TOP_K, keys.shape[1])).values
    both = torch.cat([best, keys], 1)
    return both.topk(min(TOP_K, both.shape[1])).values
