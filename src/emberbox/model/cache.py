"""Everything a sequence leaves behind on the device: pages of latent rows, slots of KDA state.

The layout belongs to the network. Latent rows and pooled indexer keys lie in pages of 64 tokens
that an engine hands out; KDA state, three convolution inputs and the keys of the unfinished pool
lie in slots, one per running sequence. All is allocated at construction and nothing grows.

Tokens under verification change nothing here: their factors wait in `_pending` until `commit` says
how many were accepted. Knows no requests and no scheduling.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from emberbox.errors import OpError
from emberbox.model.batch import Span
from emberbox.model.config import PAGE_TOKENS, TextConfig
from emberbox.model.steps import Part, Steps, in_parts
from emberbox.ops.table import OpTable


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How much to allocate."""

    num_pages: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class KdaPast:
    """state [H, Dk, Dv] float32; conv [W-1, 3*H*D], the convolution's last inputs, oldest first."""

    state: Tensor
    conv: Tensor


@dataclass(frozen=True, slots=True)
class KdaTokens:
    """Tokens under verification: conv inputs [n, C], k, gate [n, H, Dk], deltas [n, H, Dv]."""

    conv: Tensor
    k: Tensor
    gate: Tensor
    deltas: Tensor


@dataclass(frozen=True, slots=True)
class SparsePast:
    """latents [n, C]; pooled [n // pool, D]; keys, gates [n % pool, D] of the unfinished pool."""

    latents: Tensor
    pooled: Tensor
    keys: Tensor
    gates: Tensor


@dataclass(frozen=True, slots=True)
class SparseTokens:
    """New tokens: latents [n, C], indexer keys, gates [n, D]; and the layer's `ape` [pool, D]."""

    latents: Tensor
    keys: Tensor
    gates: Tensor
    ape: Tensor


class Cache:
    """Pages and slots of the layers given. Shapes are in the attributes' comments.

    `layers` counts (KDA, sparse) layers: Network.new_cache and new_draft_cache know them. Both
    caches may use the same page numbers.
    """

    def __init__(
        self,
        config: TextConfig,
        size: CacheSize,
        ops: OpTable,
        *,
        layers: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_kda, num_sparse = layers
        H, D, C = config.kda_heads, config.kda_head_dim, 3 * config.kda_heads * config.kda_head_dim
        Di, pool = config.index_head_dim, config.index_kpool
        pages, slots = size.num_pages, size.num_slots
        self.pool, self.ops = pool, ops

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        wide = torch.promote_types(dtype, torch.float32)
        self.state = zeros(num_kda, slots, H, D, D, dtype=wide)
        self.conv = zeros(num_kda, slots, config.conv_width - 1, C)
        self.latents = zeros(num_sparse, pages, PAGE_TOKENS, config.kv_lora_rank)
        self.pooled = zeros(num_sparse, pages, PAGE_TOKENS // pool, Di)
        self.ring_keys = zeros(num_sparse, slots, pool - 1, Di, dtype=wide)
        self.ring_gates = zeros(num_sparse, slots, pool - 1, Di, dtype=wide)
        self._pending: dict[int, _Pending] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, all of them at construction."""
        tensors = (
            self.state,
            self.conv,
            self.latents,
            self.pooled,
            self.ring_keys,
            self.ring_gates,
        )
        return sum(t.numel() * t.element_size() for t in tensors)

    def begin(self, spans: tuple[Span, ...]) -> tuple[Part, ...]:
        """Check spans against what is allocated; call once per forward pass, before any layer.

        Returns what the layers take: the spans, neighbouring ones of one written token as Steps.
        Raises OpError when a slot still waits for a commit or the pages do not cover the tokens.
        """
        for span in spans:
            if span.slot in self._pending:
                raise OpError(
                    f"cache: slot {span.slot} has tokens under verification; commit first"
                )
            if not 0 <= span.slot < self.state.shape[1]:
                raise OpError(f"cache: slot {span.slot} of {self.state.shape[1]}")
            held = len(span.pages) * PAGE_TOKENS
            needed = span.position + span.num_tokens
            if held < needed:
                raise OpError(f"cache: slot {span.slot} needs {needed} rows, its pages hold {held}")
            if any(not 0 <= page < self.latents.shape[1] for page in span.pages):
                raise OpError(f"cache: page out of 0..{self.latents.shape[1] - 1} in {span.pages}")
        for span in spans:
            if span.num_verify:
                self._pending[span.slot] = _Pending(span)
        return in_parts(spans, self.pool, self.latents.device)

    def read_kda(self, layer: int, span: Span) -> KdaPast:
        """State before the span's first token; zeros at position 0 whatever the slot held."""
        state, conv = self.state[layer, span.slot], self.conv[layer, span.slot]
        if span.position == 0:
            return KdaPast(torch.zeros_like(state), torch.zeros_like(conv))
        return KdaPast(state, conv)

    def write_kda(self, layer: int, span: Span, past: KdaPast, waiting: KdaTokens | None) -> None:
        """Keep the state after the written tokens; hold the rest until commit."""
        self.state[layer, span.slot] = past.state
        self.conv[layer, span.slot] = past.conv
        if waiting is not None:
            self._pending[span.slot].kda[layer] = waiting

    def read_sparse(self, layer: int, span: Span) -> SparsePast:
        """Rows of all tokens before the span."""
        n, tail = span.position, span.position % self.pool
        pages = torch.tensor(span.pages[: -(-n // PAGE_TOKENS)], device=self.latents.device).long()
        return SparsePast(
            latents=self.latents[layer, pages].flatten(0, 1)[:n],
            pooled=self.pooled[layer, pages].flatten(0, 1)[: n // self.pool],
            keys=self.ring_keys[layer, span.slot, :tail],
            gates=self.ring_gates[layer, span.slot, :tail],
        )

    def write_sparse(self, layer: int, span: Span, tokens: SparseTokens) -> None:
        """Write the rows of the span's written tokens; hold the rest until commit."""
        n = span.num_written
        if n:
            self._append(layer, span, span.position, _first(tokens, n))
        if span.num_verify:
            rest = SparseTokens(tokens.latents[n:], tokens.keys[n:], tokens.gates[n:], tokens.ape)
            self._pending[span.slot].sparse[layer] = rest

    def write_steps(self, layer: int, steps: Steps, new: SparseTokens) -> None:
        """Write one token of each sequence: latents, and its key to the ring or its pool's mean."""
        self.latents[layer].flatten(0, 1).index_copy_(0, steps.rows, new.latents)
        if steps.open_pools is not None:
            members, rows = steps.open_pools.members, steps.open_pools.rows
            self.ring_keys[layer].flatten(0, 1).index_copy_(0, rows, new.keys[members])
            self.ring_gates[layer].flatten(0, 1).index_copy_(0, rows, new.gates[members])
        if steps.full_pools is not None:
            members, rows = steps.full_pools.members, steps.full_pools.rows
            slots = steps.slots[members]
            keys = torch.cat([self.ring_keys[layer, slots], new.keys[members, None]], dim=1)
            gates = torch.cat([self.ring_gates[layer, slots], new.gates[members, None]], dim=1)
            pooled = self.ops.index_pool(keys, gates, new.ape).to(self.pooled.dtype)
            self.pooled[layer].flatten(0, 1).index_copy_(0, rows, pooled)

    def pooled_of(self, layer: int, steps: Steps) -> Tensor:
        """Pooled keys [B, P, D], as many as the longest sequence has; others' end in any values."""
        num_pools = (steps.last_position + 1) // self.pool
        pages = steps.table[:, : -(-num_pools * self.pool // PAGE_TOKENS)]
        return self.pooled[layer, pages].flatten(1, 2)[:, :num_pools]

    def latents_of(self, layer: int, steps: Steps, indices: Tensor) -> Tensor:
        """Latents [B, K, C] of tokens `indices` [B, K]; the first token's where an index is -1."""
        at = indices.clamp(min=0)
        pages = steps.table.gather(1, at.div(PAGE_TOKENS, rounding_mode="floor"))
        return self.latents[layer].flatten(0, 1)[pages * PAGE_TOKENS + at % PAGE_TOKENS]

    def commit(self, accepted: Mapping[int, int]) -> None:
        """Apply the first `accepted[slot]` tokens under verification of each slot, drop the others.

        Raises OpError, changing nothing, for a slot that verifies nothing or fewer tokens.
        """
        for slot, count in accepted.items():
            if slot not in self._pending:
                raise OpError(f"cache: slot {slot} has no tokens under verification")
            if not 0 <= count <= self._pending[slot].span.num_verify:
                most = self._pending[slot].span.num_verify
                raise OpError(f"cache: slot {slot} cannot accept {count} of {most} tokens")
        for slot, count in accepted.items():
            pending = self._pending.pop(slot)
            if count:
                self._apply(pending, count)

    def is_waiting(self, slot: int) -> bool:
        """Whether a slot has tokens under verification."""
        return slot in self._pending

    def discard(self, slot: int) -> None:
        """Forget tokens under verification of a slot, if any (a request was aborted)."""
        self._pending.pop(slot, None)

    def _apply(self, pending: "_Pending", count: int) -> None:
        span = pending.span
        for layer, kda in pending.kda.items():
            state = self.state[layer, span.slot]
            self.state[layer, span.slot] = self.ops.kda_commit(
                kda.k[:count], kda.deltas[:count], kda.gate[:count], state
            )
            conv = torch.cat([self.conv[layer, span.slot], kda.conv[:count]])
            self.conv[layer, span.slot] = conv[count:]
        for layer, tokens in pending.sparse.items():
            self._append(layer, span, span.position + span.num_written, _first(tokens, count))

    def _append(self, layer: int, span: Span, position: int, new: SparseTokens) -> None:
        """Tokens from `position` on: latents, finished pools into pages, the rest to the ring."""
        n, pool = new.latents.shape[0], self.pool
        device = self.latents.device
        rows = torch.arange(position, position + n, device=device)
        pages = torch.tensor(span.pages, device=device).long()
        self.latents[layer, pages[rows // PAGE_TOKENS], rows % PAGE_TOKENS] = new.latents
        tail = position % pool
        keys = torch.cat([self.ring_keys[layer, span.slot, :tail], new.keys])
        gates = torch.cat([self.ring_gates[layer, span.slot, :tail], new.gates])
        pooled = pool_complete(self.ops, keys, gates, new.ape)
        done = pooled.shape[0]
        at = torch.arange(position // pool, position // pool + done, device=device)
        per_page = PAGE_TOKENS // pool
        self.pooled[layer, pages[at // per_page], at % per_page] = pooled.to(self.pooled.dtype)
        rest = keys.shape[0] - done * pool
        self.ring_keys[layer, span.slot, :rest] = keys[done * pool :]
        self.ring_gates[layer, span.slot, :rest] = gates[done * pool :]


class _Pending:
    """What a slot's tokens under verification would write, layer by layer."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.kda: dict[int, KdaTokens] = {}
        self.sparse: dict[int, SparseTokens] = {}


def pool_complete(ops: OpTable, keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """keys, gates [n, D], ape [pool, D] -> pooled keys [n // pool, D] of the complete pools."""
    pool, width = ape.shape
    done = keys.shape[0] // pool
    shape = (done, pool, width)
    return ops.index_pool(
        keys[: done * pool].reshape(shape), gates[: done * pool].reshape(shape), ape
    )


def _first(tokens: SparseTokens, n: int) -> SparseTokens:
    return SparseTokens(tokens.latents[:n], tokens.keys[:n], tokens.gates[:n], tokens.ape)
