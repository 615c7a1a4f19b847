"""Everything a sequence leaves behind on the device: pages of latent rows, slots of KDA state.

The layout belongs to the network. Latent rows and pooled indexer keys lie in pages of 64 tokens
that an engine hands out; KDA state, three convolution inputs and the newest indexer keys lie in
slots, one per running sequence. All is allocated at construction and nothing grows.

Tokens under verification change nothing here: their factors wait in `_pending` until `commit` says
how many were accepted. Knows no requests and no scheduling.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from emberbox.errors import OpError
from emberbox.model.batch import MAX_VERIFY_TOKENS, Span
from emberbox.model.config import PAGE_TOKENS, TextConfig
from emberbox.model.steps import Part, Steps, in_parts
from emberbox.ops.fp8_rows import BLOCK as SCALE_BLOCK
from emberbox.ops.fp8_rows import FP8 as FP8
from emberbox.ops.fp8_rows import dequantise_rows, quantise_rows
from emberbox.ops.table import OpTable


def ring_tokens(pool: int) -> int:
    """Tokens whose indexer keys a slot keeps, token t in row t mod that many: an unfinished pool
    and what may be under verification behind it. A power of two, so a multiple of every pool."""
    return 1 << (pool + MAX_VERIFY_TOKENS - 1).bit_length()


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
    caches may use the same page numbers. `like`: has the dtype of activations, and the device.
    """

    def __init__(
        self,
        config: TextConfig,
        size: CacheSize,
        ops: OpTable,
        *,
        layers: tuple[int, int],
        like: Tensor,
        latent_dtype: torch.dtype | None = None,
    ) -> None:
        num_kda, num_sparse = layers
        H, D, C = config.kda_heads, config.kda_head_dim, 3 * config.kda_heads * config.kda_head_dim
        Di, pool = config.index_head_dim, config.index_kpool
        pages, slots = size.num_pages, size.num_slots
        self.pool, self.ring, self.ops = pool, ring_tokens(pool), ops

        def zeros(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        wide = torch.promote_types(like.dtype, torch.float32)
        self.state = zeros(num_kda, slots, H, D, D, dtype=wide)
        self.conv = zeros(num_kda, slots, config.conv_width - 1, C)
        width = config.kv_lora_rank
        self.latents = zeros(
            num_sparse, pages, PAGE_TOKENS, width, dtype=latent_dtype or like.dtype
        )
        self.scales = None  # of blocks of 128 latents in FP8, [num_sparse, pages, 64, C / 128]
        if self.latents.dtype == FP8:
            blocks = width // SCALE_BLOCK
            self.scales = zeros(num_sparse, pages, PAGE_TOKENS, blocks, dtype=torch.float32)
        self.pooled = zeros(num_sparse, pages, PAGE_TOKENS // pool, Di)
        self.ring_keys = zeros(num_sparse, slots, self.ring, Di, dtype=wide)
        self.ring_gates = zeros(num_sparse, slots, self.ring, Di, dtype=wide)
        self._pending: dict[int, _Pending] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, all of them at construction."""
        return sum(t.numel() * t.element_size() for t in (*self.of_slots, *self.of_pages))

    @property
    def of_slots(self) -> tuple[Tensor, ...]:
        """Tensors [layers, slots, ...]."""
        return self.state, self.conv, self.ring_keys, self.ring_gates

    @property
    def of_pages(self) -> tuple[Tensor, ...]:
        """Tensors [layers, pages, ...]; bytes where they are FP8, which torch copies."""
        if self.scales is None:
            return self.latents, self.pooled
        return self.latents.view(torch.uint8), self.scales, self.pooled

    def begin(self, spans: tuple[Span, ...]) -> tuple[Part, ...]:
        """Check spans against what is allocated; call once per forward pass, before any layer.

        Returns what the layers take: the spans, neighbouring ones of one written token as Steps.
        Raises OpError when a slot still waits for a commit or the pages do not cover the tokens.
        """
        self.check(spans)
        for span in spans:
            if span.num_verify:
                self._pending[span.slot] = _Pending(span)
        return in_parts(spans, self.pool, self.ring, self.latents.device)

    def check(self, spans: tuple[Span, ...]) -> None:
        """Raises OpError as `begin` does."""
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
            if min(span.pages) < 0 or max(span.pages) >= self.latents.shape[1]:
                raise OpError(f"cache: page out of 0..{self.latents.shape[1] - 1} in {span.pages}")

    def begin_decode(self, spans: tuple[Span, ...]) -> None:
        """The same for a step whose drafts somebody else keeps until `commit` (DecodeStep).

        Raises OpError as `begin` does.
        """
        self.check(spans)
        for span in spans:
            if span.num_verify:
                self._pending[span.slot] = _Pending(span)

    def latent_rows(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """A layer's latents of all pages one after another [R, C]; scales [R, C / 128] of FP8."""
        scales = None if self.scales is None else self.scales[layer].flatten(0, 1)
        return self.latents[layer].flatten(0, 1), scales

    def rows_of(self, span: Span) -> tuple[Tensor, ...]:
        """slots, positions, counts [1] and table [1, P], int32: the span as one sequence's rows."""

        def tensor(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.latents.device)

        table = tensor(*span.pages).unsqueeze(0)
        return tensor(span.slot), tensor(span.position), tensor(span.num_tokens), table

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
        n = span.position
        pages = torch.tensor(span.pages[: -(-n // PAGE_TOKENS)], device=self.latents.device).long()
        return SparsePast(
            latents=self._read(layer, pages).flatten(0, 1)[:n],
            pooled=self.pooled[layer, pages].flatten(0, 1)[: n // self.pool],
            keys=self.ring_keys[layer, span.slot, self._unfinished(n)],
            gates=self.ring_gates[layer, span.slot, self._unfinished(n)],
        )

    def _unfinished(self, position: int) -> slice:
        """Ring rows of the tokens of the unfinished pool before `position`."""
        tail = position % self.pool
        start = (position - tail) % self.ring
        return slice(start, start + tail)

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
        self._write_rows(layer, steps.rows, new.latents)
        if steps.open_pools is not None:
            members, rows = steps.open_pools.members, steps.open_pools.rows
            self.ring_keys[layer].flatten(0, 1).index_copy_(0, rows, new.keys[members])
            self.ring_gates[layer].flatten(0, 1).index_copy_(0, rows, new.gates[members])
        if steps.full_pools is not None:
            members, rows = steps.full_pools.members, steps.full_pools.rows
            held = self._held(steps, members)
            keys = torch.cat(
                [self.ring_keys[layer].flatten(0, 1)[held], new.keys[members, None]], dim=1
            )
            gates = torch.cat(
                [self.ring_gates[layer].flatten(0, 1)[held], new.gates[members, None]], dim=1
            )
            pooled = self.ops.index_pool(keys, gates, new.ape).to(self.pooled.dtype)
            self.pooled[layer].flatten(0, 1).index_copy_(0, rows, pooled)

    def _held(self, steps: Steps, members: Tensor) -> Tensor:
        """Ring rows [b, pool - 1] of the tokens before that which completes each member's pool."""
        first = (steps.positions[members] + 1 - self.pool) % self.ring
        start = steps.slots[members] * self.ring + first
        return start.unsqueeze(-1) + torch.arange(self.pool - 1, device=start.device)

    def pooled_of(self, layer: int, steps: Steps) -> Tensor:
        """Pooled keys [B, P, D], as many as the longest sequence has; others' end in any values."""
        num_pools = (steps.last_position + 1) // self.pool
        pages = steps.table[:, : -(-num_pools * self.pool // PAGE_TOKENS)]
        return self.pooled[layer, pages].flatten(1, 2)[:, :num_pools]

    def latents_of(self, layer: int, steps: Steps, indices: Tensor) -> Tensor:
        """Latents [B, K, C] of tokens `indices` [B, K]; the first token's where an index is -1."""
        at = indices.clamp(min=0)
        pages = steps.table.gather(1, at.div(PAGE_TOKENS, rounding_mode="floor"))
        return self._read_rows(layer, pages * PAGE_TOKENS + at % PAGE_TOKENS)

    def as_cached(self, latents: Tensor) -> Tensor:
        """Latents [n, C] as they will be read again: however a prompt is cut, all see the same."""
        if self.scales is None:
            return latents
        return dequantise_rows(*quantise_rows(latents)).to(self.pooled.dtype)

    def _read(self, layer: int, pages: Tensor) -> Tensor:
        """Latents [n, 64, C] of pages."""
        within = torch.arange(PAGE_TOKENS, device=pages.device)
        return self._read_rows(layer, pages.unsqueeze(-1) * PAGE_TOKENS + within)

    def _read_rows(self, layer: int, rows: Tensor) -> Tensor:
        """Latents [..., C] of flat rows, in the type of pooled keys."""
        latents, scales = self.latent_rows(layer)
        if scales is None:
            return latents[rows]
        found = latents.view(torch.uint8)[rows].view(FP8)
        return dequantise_rows(found, scales[rows]).to(self.pooled.dtype)

    def _write_rows(self, layer: int, rows: Tensor, new: Tensor) -> None:
        latents, scales = self.latent_rows(layer)
        if scales is None:
            latents.index_copy_(0, rows, new)
            return
        values, new_scales = quantise_rows(new)
        latents.view(torch.uint8).index_copy_(0, rows, values.view(torch.uint8))
        scales.index_copy_(0, rows, new_scales)

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
        at = pages[rows // PAGE_TOKENS] * PAGE_TOKENS + rows % PAGE_TOKENS
        self._write_rows(layer, at, new.latents)
        held = self._unfinished(position)
        keys = torch.cat([self.ring_keys[layer, span.slot, held], new.keys])
        gates = torch.cat([self.ring_gates[layer, span.slot, held], new.gates])
        pooled = pool_complete(self.ops, keys, gates, new.ape)
        done = pooled.shape[0]
        at = torch.arange(position // pool, position // pool + done, device=device)
        per_page = PAGE_TOKENS // pool
        self.pooled[layer, pages[at // per_page], at % per_page] = pooled.to(self.pooled.dtype)
        rest = self._unfinished(position + n)
        self.ring_keys[layer, span.slot, rest] = keys[done * pool :]
        self.ring_gates[layer, span.slot, rest] = gates[done * pool :]


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
