"""What one forward pass is asked to do: tokens of several sequences, and where each one stands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from emberbox.errors import OpError

MAX_VERIFY_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a batch: rows start..stop, the first of them at token `position`.

    `slot` holds its KDA state; `pages` its latent rows, page i for tokens 64 i .. 64 i + 63. The
    last `num_verify` rows are read but not written: `Cache.commit` says how many of them are kept.
    """

    start: int
    stop: int
    position: int
    slot: int
    pages: tuple[int, ...]
    num_verify: int = 0

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_written(self) -> int:
        """Rows whose effect on the cache is immediate."""
        return self.num_tokens - self.num_verify


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of all sequences, one after another.

    token_ids [T] int64. `features` maps nothing or replaces embeddings: rows `feature_rows` [F]
    int64 take `features` [F, hidden] (image tokens).
    """

    token_ids: Tensor
    spans: tuple[Span, ...]
    features: Tensor | None = None
    feature_rows: Tensor | None = None

    def __post_init__(self) -> None:
        edges = [0, *(span.stop for span in self.spans)]
        starts = [span.start for span in self.spans]
        if starts != edges[:-1] or any(a >= b for a, b in pairwise(edges)):
            raise OpError(f"batch: spans {self.spans} do not follow one another from row 0")
        if edges[-1] != self.token_ids.shape[0]:
            raise OpError(f"batch: {self.token_ids.shape[0]} tokens, spans end at {edges[-1]}")
        for span in self.spans:
            if not 0 <= span.num_verify <= min(MAX_VERIFY_TOKENS, span.num_tokens):
                raise OpError(
                    f"batch: slot {span.slot} verifies {span.num_verify} of {span.num_tokens} "
                    f"tokens; 0..{MAX_VERIFY_TOKENS} are possible"
                )
        slots = [span.slot for span in self.spans]
        if len(set(slots)) != len(slots):
            raise OpError(f"batch: a slot stands twice in {slots}")

    @classmethod
    def of(cls, rows: Sequence["SequenceRows"], device: torch.device) -> "Batch":
        """Lay out several sequences' new tokens. Raises OpError as the constructor does."""
        spans: list[Span] = []
        tokens: list[int] = []
        start = 0
        for row in rows:
            stop = start + len(row.token_ids)
            spans.append(Span(start, stop, row.position, row.slot, row.pages, row.num_verify))
            tokens.extend(row.token_ids)
            start = stop
        at, features = [], []
        for span, row in zip(spans, rows, strict=True):
            for offset, feature in row.features.items():
                at.append(span.start + offset)
                features.append(feature)
        return cls(
            token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
            spans=tuple(spans),
            features=torch.stack(features) if features else None,
            feature_rows=torch.tensor(at, device=device) if at else None,
        )


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """New tokens of one sequence. `features`: offset among them -> embedding [hidden]."""

    token_ids: Sequence[int]
    position: int
    slot: int
    pages: tuple[int, ...]
    num_verify: int = 0
    features: Mapping[int, Tensor] = field(default_factory=dict)
