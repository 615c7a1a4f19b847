"""A decode step's spans taken together: sequences that have a past and one new token each.

Their rows are computed as one batch, whatever the lengths of their pasts; other spans, which differ
in length, are taken one by one. Index tensors are made once per pass and serve every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from emberbox.model.batch import Span
from emberbox.model.config import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Pools:
    """What becomes of the new indexer keys: `members` [b] of the B sequences, where they go [b].

    Of a pool that stays open, `rows` are ring rows; of one that its new key completes, rows of
    pooled keys.
    """

    members: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Steps:
    """Neighbouring rows start..stop of a batch, one per sequence. B of them; int64 tensors.

    slots, positions, rows (flat latent row of the new token) [B]; table [B, P] pages, padded with
    each sequence's first.
    """

    start: int
    stop: int
    last_position: int  # the largest
    slots: Tensor
    positions: Tensor
    rows: Tensor
    table: Tensor
    open_pools: Pools | None
    full_pools: Pools | None

    @classmethod
    def of(cls, spans: Sequence[Span], pool: int, ring: int, device: torch.device) -> "Steps":
        """Of neighbouring spans; `pool` tokens share a key, a slot's ring has `ring` rows."""
        last = max(span.position for span in spans)
        width = last // PAGE_TOKENS + 1
        table, rows, open_rows, full_rows = [], [], {}, {}
        for member, span in enumerate(spans):
            page = span.pages[span.position // PAGE_TOKENS]
            row = page * PAGE_TOKENS + span.position % PAGE_TOKENS
            rows.append(row)
            table.append([*span.pages[:width], *span.pages[:1] * (width - len(span.pages))])
            if span.position % pool == pool - 1:
                full_rows[member] = row // pool
            else:
                open_rows[member] = span.slot * ring + span.position % ring

        def tensor(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def pools(at: dict[int, int]) -> Pools | None:
            return Pools(tensor(list(at)), tensor(list(at.values()))) if at else None

        return cls(
            start=spans[0].start,
            stop=spans[-1].stop,
            last_position=last,
            slots=tensor([span.slot for span in spans]),
            positions=tensor([span.position for span in spans]),
            rows=tensor(rows),
            table=tensor(table),
            open_pools=pools(open_rows),
            full_pools=pools(full_rows),
        )


Part: TypeAlias = Span | Steps


def is_step(span: Span) -> bool:
    """One token, written at once, with a past."""
    return span.num_tokens == 1 and span.num_verify == 0 and span.position > 0


def in_parts(spans: Sequence[Span], pool: int, ring: int, device: torch.device) -> tuple[Part, ...]:
    """The spans in order, neighbouring steps as one."""
    parts: list[Part] = []
    for step, group in groupby(spans, is_step):
        own = tuple(group)
        parts += (Steps.of(own, pool, ring, device),) if step else own
    return tuple(parts)
