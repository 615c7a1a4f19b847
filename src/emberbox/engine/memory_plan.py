"""What goes where in memory, decided before a byte is loaded; what does not fit is refused.

The sizes of cache and snapshots are exact: they equal `Cache.num_bytes` and
`SnapshotStore.num_bytes`. Workspace and vision are estimates from above (workspace.py), and so is
what CUDA itself takes (decode_memory.py). Knows no tensors: it computes with a config's shapes.

Of the memory that weights, reserve and slots leave, snapshots take at most a quarter (and at most
2 GB, at most 64 of them), then workspace and one request of full length must fit, then the cache
grows to at most half of what is left.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from emberbox.chat.media_settings import MediaSettings
from emberbox.engine.decode_memory import buffer_bytes, graph_bytes
from emberbox.engine.workspace import Kernels, Workspace, vision_bytes
from emberbox.errors import MemoryRefused, SettingsError
from emberbox.model.cache import FP8, ring_tokens
from emberbox.model.config import PAGE_TOKENS, Glm5NextConfig, TextConfig
from emberbox.ops.fp8_rows import BLOCK as SCALE_BLOCK
from emberbox.settings import MAX_TOKENS, EngineSettings

MAX_IMAGE_TOKENS = MediaSettings().max_image_tokens
DEFAULT_SNAPSHOT_BYTES = 2 * 10**9
DEFAULT_MAX_SNAPSHOTS = 64
CACHE_CONTEXTS = 4  # the default cache holds at most this many requests of full length
RESERVE = "reserve"
RESERVE_BYTES = 1024**3  # what is left to others: this, or a tenth of a smaller machine


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One use of memory; `note` says how its size came about."""

    name: str
    num_bytes: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Every use of memory, and the sizes to allocate with."""

    lines: tuple[MemoryLine, ...]
    available_bytes: int
    num_pages: int
    num_slots: int
    num_snapshots: int
    max_model_len: int
    prefill_tokens: int
    latent_dtype: torch.dtype | None = None  # of cached latents, if not that of activations

    @property
    def total(self) -> int:
        """Bytes of all lines."""
        return sum(line.num_bytes for line in self.lines)

    @property
    def peak_bytes(self) -> int:
        """What will be taken at most: all but what is left to others."""
        return sum(line.num_bytes for line in self.lines if line.name != RESERVE)

    def table(self) -> str:
        """The lines as text, then what they sum up to and what there is."""
        rows = [
            *((line.name, f"{line.num_bytes:,}", line.note) for line in self.lines),
            ("total", f"{self.total:,}", f"of {self.available_bytes:,} bytes available"),
        ]
        name, size = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{row[0]:<{name}}  {row[1]:>{size}}  {row[2]}".rstrip() for row in rows)


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Bytes of one page, slot and snapshot of the trunk's cache. `item`: bytes of an activation."""

    page: int
    slot: int

    @property
    def snapshot(self) -> int:
        """A slot, and one page that is partly filled."""
        return self.slot + self.page

    @staticmethod
    def of(text: TextConfig, item: int, latent_dtype: torch.dtype | None = None) -> "CacheBytes":
        """As model/cache.py lays them out: state and ring in float32 or wider, the rest as `item`.

        page = sparse layers x (64 x latent + 64 / pool x Di) x item; a latent in FP8 takes a byte,
        and 4 for each 128
        slot = KDA layers x (H D^2 x wide + (W - 1) 3 H D x item)
             + sparse layers x 2 ring Di x wide
        """
        H, D, Di, pool = text.kda_heads, text.kda_head_dim, text.index_head_dim, text.index_kpool
        wide, num_sparse = max(item, 4), sum(text.layer_is_sparse)
        width = text.kv_lora_rank
        latent = width + 4 * (width // SCALE_BLOCK) if latent_dtype is FP8 else width * item
        num_kda = text.num_hidden_layers - num_sparse
        conv = (text.conv_width - 1) * 3 * H * D
        return CacheBytes(
            page=num_sparse * (PAGE_TOKENS * latent + PAGE_TOKENS // pool * Di * item),
            slot=num_kda * (H * D * D * wide + conv * item)
            + num_sparse * 2 * ring_tokens(pool) * Di * wide,
        )


def plan_memory(  # noqa: PLR0913  each is a fact of its own
    config: Glm5NextConfig,
    *,
    weight_bytes: int,
    available_bytes: int,
    dtype: torch.dtype,
    settings: EngineSettings,
    max_image_tokens: int = MAX_IMAGE_TOKENS,
    is_prepared: bool = False,
    has_graphs: bool = False,
) -> MemoryPlan:
    """The plan of a checkpoint whose weights take `weight_bytes` in memory once loaded.

    `available_bytes`: what can be had before they are. `dtype`: of activations and cache.
    `is_prepared`: kernels read some of the weights, and keep working memory of their own.
    `has_graphs`: a GPU whose decode steps are graphs (`loading.has_graphs`). A `max_model_len` that
    is given is kept; else it is the model's own, or the largest multiple of 64 that fits. Raises
    SettingsError for one beyond the model and for an FP8 cache of latents that are not whole
    blocks, MemoryRefused when it does not fit.
    """
    budget = _Budget(
        config,
        weight_bytes,
        available_bytes,
        dtype.itemsize,
        max_image_tokens,
        Kernels(is_prepared, has_graphs),
        _latent_dtype(config.text, settings),
    )
    context = config.text.max_position_embeddings
    if (settings.max_model_len or 1) > context:
        raise SettingsError(
            f"max_model_len: {settings.max_model_len} is beyond the model's context",
            hint=f"the model holds 1..{context} tokens",
        )
    if budget.least(settings) > available_bytes:
        asked = (settings.snapshot_bytes or 0) // budget.sizes.snapshot
        plan = budget.plan(settings, budget.shortest(settings), asked)
        raise MemoryRefused(
            f"this does not fit into {available_bytes:,} bytes, "
            f"{plan.total - available_bytes:,} are missing\n{plan.table()}",
            hint=budget.advice(settings),
        )
    snapshots = budget.num_snapshots(settings)
    length = settings.max_model_len or budget.longest(settings, snapshots)
    return budget.plan(settings, length, snapshots)


@dataclass(frozen=True, slots=True)
class _Budget:
    """Sizes that no setting changes. `item`: bytes of an activation."""

    config: Glm5NextConfig
    weight_bytes: int
    available: int
    item: int
    max_image_tokens: int
    kernels: Kernels
    latent_dtype: torch.dtype | None

    @property
    def sizes(self) -> CacheBytes:
        return CacheBytes.of(self.config.text, self.item, self.latent_dtype)

    @property
    def reserve(self) -> int:
        return min(RESERVE_BYTES, self.available // 10)

    def work(self, settings: EngineSettings, length: int) -> tuple[MemoryLine, ...]:
        """What steps and pictures need, which take turns, and what runs them."""
        text, item, running = self.config.text, self.item, settings.max_running
        work = Workspace.of(text, item, settings, length, self.kernels)
        vision = vision_bytes(self.config.vision, item, self.max_image_tokens)
        lines = (
            MemoryLine("workspace", work.num_bytes + work.kept, f"estimate: {work.note}"),
            MemoryLine("vision", max(0, vision - work.num_bytes), self._vision_note(vision)),
        )
        if not self.kernels.graphs:
            return lines
        buffers = buffer_bytes(text, item, running, length)
        graphs = graph_bytes(text, item, running)
        return (
            *lines,
            MemoryLine("decode steps", buffers, "buffers of fixed shapes"),
            MemoryLine("CUDA context and graphs", graphs, "estimate"),
        )

    def work_bytes(self, settings: EngineSettings, length: int) -> int:
        """The sum of these."""
        return sum(line.num_bytes for line in self.work(settings, length))

    def left(self, settings: EngineSettings) -> int:
        """What work, cache and snapshots share; below 0 when there is nothing."""
        fixed = self.weight_bytes + self.reserve
        return self.available - fixed - settings.max_running * self.sizes.slot

    def shortest(self, settings: EngineSettings) -> int:
        """The length below which the settings do not let us go."""
        most = min(PAGE_TOKENS, self.config.text.max_position_embeddings)
        return settings.max_model_len or min(most, settings.cache_tokens or most)

    def length_bytes(self, settings: EngineSettings, length: int) -> int:
        """Work, and the cache that is asked for or else that of one request."""
        pages = _pages(settings.cache_tokens or length) * self.sizes.page
        return pages + self.work_bytes(settings, length)

    def least(self, settings: EngineSettings) -> int:
        """Bytes below which the settings cannot be met."""
        asked = (settings.snapshot_bytes or 0) // self.sizes.snapshot * self.sizes.snapshot
        needed = asked + self.length_bytes(settings, self.shortest(settings))
        return self.available - self.left(settings) + needed

    def num_snapshots(self, settings: EngineSettings) -> int:
        """As many as asked for; else a quarter of what is left, bounded, that the rest spares."""
        one = self.sizes.snapshot
        if settings.snapshot_bytes is not None:
            return settings.snapshot_bytes // one
        left = self.left(settings)
        spare = left - self.length_bytes(settings, self.shortest(settings))
        return min(min(DEFAULT_SNAPSHOT_BYTES, left // 4, spare) // one, DEFAULT_MAX_SNAPSHOTS)

    def longest(self, settings: EngineSettings, num_snapshots: int) -> int:
        """The model's context, or the largest multiple of 64 that fits beside the snapshots."""
        left = self.left(settings) - num_snapshots * self.sizes.snapshot
        most = min(settings.cache_tokens or MAX_TOKENS, self.config.text.max_position_embeddings)
        if self.length_bytes(settings, most) <= left:
            return most
        return PAGE_TOKENS * _largest(
            1, most // PAGE_TOKENS, lambda n: self.length_bytes(settings, n * PAGE_TOKENS) <= left
        )

    def num_pages(self, settings: EngineSettings, length: int, num_snapshots: int) -> int:
        """What is asked for; else all that could be used, in half of the memory left."""
        if settings.cache_tokens is not None:
            return _pages(settings.cache_tokens)
        left = self.left(settings) - self.work_bytes(settings, length)
        half = (left - num_snapshots * self.sizes.snapshot) // 2 // self.sizes.page
        context = self.config.text.max_position_embeddings
        useful = min(settings.max_running * context, CACHE_CONTEXTS * length)
        return max(_pages(length), min(_pages(useful), half))

    def plan(self, settings: EngineSettings, length: int, num_snapshots: int) -> MemoryPlan:
        sizes = self.sizes
        pages = self.num_pages(settings, length, num_snapshots)
        context = self.config.text.max_position_embeddings
        slots, prefill = settings.max_running, settings.prefill_tokens
        lowered = "" if length == context else f" (the model holds {context:,})"
        per_token = sizes.page / PAGE_TOKENS
        lines = (
            MemoryLine("weights", self.weight_bytes, "once loaded"),
            MemoryLine(
                "cache pages",
                pages * sizes.page,
                f"{pages * PAGE_TOKENS:,} tokens of {per_token:,.0f} bytes; "
                f"one request has at most {length:,}{lowered}",
            ),
            MemoryLine("state slots", slots * sizes.slot, f"{slots} of {sizes.slot:,}"),
            MemoryLine(
                "snapshots",
                num_snapshots * sizes.snapshot,
                f"{num_snapshots} of {sizes.snapshot:,}",
            ),
            *self.work(settings, length),
            MemoryLine(RESERVE, self.reserve, "1 GiB, or a tenth of what is available"),
        )
        return MemoryPlan(
            lines=lines,
            available_bytes=self.available,
            num_pages=pages,
            num_slots=slots,
            num_snapshots=num_snapshots,
            max_model_len=length,
            prefill_tokens=prefill,
            latent_dtype=self.latent_dtype,
        )

    def _vision_note(self, num_bytes: int) -> str:
        if self.config.vision is None:
            return "the model has no vision tower"
        picture = f"one picture of {self.max_image_tokens:,} tokens"
        return f"estimate: {picture} needs {num_bytes:,}, here what steps do not"

    def advice(self, settings: EngineSettings) -> str:
        """Which setting to lower, and to what, so that it fits; for settings that do not."""
        length = self.shortest(settings)
        ways = (
            ("snapshot_bytes", settings.snapshot_bytes, 0),
            ("cache_tokens", settings.cache_tokens, length),
            ("max_model_len", settings.max_model_len, PAGE_TOKENS),
            ("max_running", settings.max_running, 1),
            ("prefill_tokens", settings.prefill_tokens, PAGE_TOKENS),
        )
        enough = []
        for name, value, low in ways:
            if value is not None and value > low:
                fits = self._fits_with(settings, name)
                if fits(low):
                    enough.append(f"{name} to {_largest(low, value, fits)}")
        if enough:
            return f"lower {', or '.join(enough)}"
        return self._advice_for_all(settings)

    def _advice_for_all(self, settings: EngineSettings) -> str:
        """When no setting is enough alone."""
        wanted = self.shortest(settings)
        low = min(PAGE_TOKENS, wanted)
        smallest = replace(
            settings,
            max_model_len=low,
            max_running=1,
            cache_tokens=None,
            snapshot_bytes=None,
            prefill_tokens=min(PAGE_TOKENS, settings.prefill_tokens),
        )
        missing = self.least(smallest) - self.available
        if missing > 0:
            return (
                f"no setting is enough: at the smallest of all {missing:,} bytes are missing; "
                "free memory, or take a smaller checkpoint"
            )
        fits = self._fits_with(smallest, "max_model_len")
        length = _largest(low, wanted, fits)
        return (
            f"no setting is enough alone; max_running 1 and prefill_tokens "
            f"{smallest.prefill_tokens} leave room for max_model_len {length}, "
            "without cache_tokens and snapshot_bytes"
        )

    def _fits_with(self, settings: EngineSettings, name: str) -> Callable[[int], bool]:
        def fits(value: int) -> bool:
            changed: dict[str, Any] = {name: value}
            return self.least(replace(settings, **changed)) <= self.available

        return fits


def _latent_dtype(text: TextConfig, settings: EngineSettings) -> torch.dtype | None:
    if settings.cache_dtype == "auto":
        return None
    if text.kv_lora_rank % SCALE_BLOCK:
        raise SettingsError(
            f"cache_dtype: fp8 has a scale for each {SCALE_BLOCK} channels of a latent, this "
            f"model's have {text.kv_lora_rank}",
            hint="leave it at auto",
        )
    return FP8


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number in low..high that fits; low does, and what is above one that does not
    does not either."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
