"""Decode steps with fixed shapes: CUDA graphs on a GPU, captured at start; plain calls elsewhere,
where only tests ask for them.

A step of n sequences takes the next larger shape that was captured; what fills it up has a count of
zero and changes nothing. All that differs from step to step is in one buffer of numbers, copied to
the device at once; all that comes back are the tokens chosen. Knows no requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from emberbox.engine.plan import MAX_DRAFTS, Work
from emberbox.model.batch import Span
from emberbox.model.cache import Cache
from emberbox.model.config import PAGE_TOKENS
from emberbox.model.decode_step import MAX_ROWS, DecodeStep, StepRows
from emberbox.model.network import Network

SEQUENCES = (1, 2, 4, 8, 16, 32)
TOKENS = (1, 2, 4, 8)  # of each sequence
WARM_UPS = 2
HEAD = 4 * MAX_ROWS  # numbers before the page tables: tokens, slots, positions, counts


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """num_sequences x num_tokens rows."""

    num_sequences: int
    num_tokens: int

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.num_tokens


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows of one sequence: logits [n, V], the argmax of each, rows before one with NaN or Inf."""

    logits: Tensor
    greedy: tuple[int, ...]
    num_finite: int


def shapes_for(max_running: int) -> tuple[Shape, ...]:
    """Every shape that at most so many sequences may need."""
    most = next((n for n in SEQUENCES if n >= max_running), SEQUENCES[-1])
    pairs = (Shape(n, m) for n, m in product(SEQUENCES, TOKENS) if n <= most)
    return tuple(shape for shape in pairs if shape.num_rows <= MAX_ROWS)


class DecodeRunner:
    """Runs a network's DecodeStep against a cache. All is allocated at construction."""

    def __init__(
        self, network: Network, cache: Cache, *, max_running: int, max_model_len: int
    ) -> None:
        self.shapes = shapes_for(max_running)
        rows = max(shape.num_rows for shape in self.shapes)
        self.cache, self.step = cache, DecodeStep(network, cache, rows)
        device = network.embedding.device
        self._max_pages = -(-max_model_len // PAGE_TOKENS)
        self._inputs = _Inputs(self._max_pages, device)
        vocab = network.config.text.vocab_size
        self._logits = torch.zeros(rows, vocab, dtype=self.step.wide, device=device)
        self._chosen = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._waiting: dict[int, int] = {}  # slot -> sequence of the last step that has drafts
        self._last = self.shapes[0]
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        if device.type == "cuda":
            torch.cuda.empty_cache()  # small weights were copied together
            self._capture(device)

    def takes(self, work: Work) -> bool:
        """Whether it is a decode step: one certain token that has a past, and drafts."""
        return (
            work.samples
            and work.position > 0
            and len(work.token_ids) == 1 + work.num_drafts
            and len(work.pages) <= self._max_pages
        )

    def max_drafts(self, num_running: int) -> int:
        """Drafts a sequence may have where so many run: a step is one shape, whose rows wait."""
        width = next((n for n in SEQUENCES if n >= num_running), MAX_ROWS + 1)
        return max([m for m in TOKENS if m * width <= MAX_ROWS], default=1) - 1

    def graph_of(self, num_sequences: int, num_tokens: int) -> torch.cuda.CUDAGraph:
        """The graph of a shape, for measurements. Raises KeyError where none was captured."""
        return self._graphs[Shape(num_sequences, num_tokens)]

    def run(self, works: Sequence[Work]) -> dict[int, Decoded]:
        """One step of each; by request. The logits are valid until the next call.

        Raises OpError for a slot or page that is not there, or drafts that were not committed.
        """
        out: dict[int, Decoded] = {}
        for group in self._groups(works):
            kept = {name: _copied(decoded) for name, decoded in out.items()}
            out = {**kept, **self._run(group)}
        return out

    def commit(self, accepted: Mapping[int, int]) -> None:
        """Keep the first accepted[slot] drafts of slots of the last step; others' are dropped."""
        counts = [0] * self._last.num_sequences
        for slot, count in accepted.items():
            if slot in self._waiting:
                counts[self._waiting[slot]] = count
        self._waiting.clear()
        if any(counts):
            slots, held = self._inputs.with_accepted(counts)
            self.step.apply(slots, held, self._last.num_rows)

    def _groups(self, works: Sequence[Work]) -> list[Sequence[Work]]:
        if not any(work.num_drafts for work in works):
            return [works[i : i + MAX_ROWS] for i in range(0, len(works), MAX_ROWS)]
        return [works]

    def _run(self, works: Sequence[Work]) -> dict[int, Decoded]:
        spans = tuple(_span(work) for work in works)
        self.cache.begin_decode(spans)
        most = max(len(work.token_ids) for work in works)
        fitting = (s for s in self.shapes if s.num_sequences >= len(works) and s.num_tokens >= most)
        shape = self._last = min(fitting, key=lambda s: s.num_rows)
        self._waiting = {work.slot: b for b, work in enumerate(works) if work.num_drafts}
        self._inputs.fill(works, shape)
        if shape in self._graphs:
            self._graphs[shape].replay()
        else:
            self._compute(shape)
        return self._read(works, shape)

    def _read(self, works: Sequence[Work], shape: Shape) -> dict[int, Decoded]:
        greedy, finite = self._chosen[:, : shape.num_rows].tolist()
        out = {}
        for b, work in enumerate(works):
            own = slice(b * shape.num_tokens, b * shape.num_tokens + len(work.token_ids))
            num_finite = [*finite[own], 0].index(0)
            out[work.request_id] = Decoded(self._logits[own], tuple(greedy[own]), num_finite)
        return out

    def _compute(self, shape: Shape) -> None:
        token_ids, rows = self._inputs.of(shape)
        logits = self.step(token_ids, rows)
        greedy, finite = self.step.ops.greedy_rows(logits)
        num_rows = shape.num_rows
        self._logits[:num_rows].copy_(logits)
        self._chosen[0, :num_rows].copy_(greedy)
        self._chosen[1, :num_rows].copy_(finite)

    @torch.inference_mode()
    def _capture(self, device: torch.device) -> None:
        """Every shape, the largest first: what it needs, smaller ones share."""
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        for shape in sorted(self.shapes, key=lambda s: s.num_rows, reverse=True):
            self._inputs.clear()
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):  # compiles, and takes what may not grow in a capture
                    self._compute(shape)
                rows = self._inputs.of(shape)[1]
                self.step.apply(rows.slots, rows.counts, shape.num_rows)  # of none: counts are 0
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                self._compute(shape)
            self._graphs[shape] = graph
        torch.cuda.synchronize(device)


class _Inputs:
    """The numbers of a step on the host, pinned, and their copy on the device; int32."""

    def __init__(self, max_pages: int, device: torch.device) -> None:
        size = HEAD + MAX_ROWS * max_pages
        self.max_pages = max_pages
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._numbers = self.host.numpy()
        self._accepted = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self._num_sequences = 0
        self._tables: list[tuple[int, ...]] = [()] * MAX_ROWS  # as they are in `host`

    def of(self, shape: Shape) -> tuple[Tensor, StepRows]:
        """token_ids [B M] and rows, as the device has them."""
        B, at = shape.num_sequences, self.device
        ids, slots, positions, counts = at[:HEAD].view(4, MAX_ROWS)
        table = at[HEAD : HEAD + B * self.max_pages].view(B, self.max_pages)
        return ids[: shape.num_rows], StepRows(slots[:B], positions[:B], counts[:B], table)

    def fill(self, works: Sequence[Work], shape: Shape) -> None:
        """Bring a step's numbers to the device."""
        head = self._numbers[:HEAD].reshape(4, MAX_ROWS)
        head[:] = 0
        for b, work in enumerate(works):
            first = b * shape.num_tokens
            head[0, first : first + len(work.token_ids)] = work.token_ids
            head[1:, b] = work.slot, work.position, len(work.token_ids)
            if work.pages != self._tables[b]:
                start = HEAD + b * self.max_pages
                self._numbers[start : start + len(work.pages)] = work.pages
                self._tables[b] = work.pages
        self._num_sequences = shape.num_sequences
        end = HEAD + shape.num_sequences * self.max_pages
        self.device[:end].copy_(self.host[:end], non_blocking=True)

    def clear(self) -> None:
        """As if no sequence were there."""
        self.device.zero_()

    def with_accepted(self, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """slots and accepted [B] of the last step."""
        B = self._num_sequences
        self._accepted[:B] = torch.tensor(counts, dtype=torch.int32)
        return self.device[MAX_ROWS : MAX_ROWS + B], self._accepted[:B]


def _span(work: Work) -> Span:
    num = len(work.token_ids)
    return Span(0, num, work.position, work.slot, work.pages, work.num_drafts)


def _copied(decoded: Decoded) -> Decoded:
    return Decoded(decoded.logits.clone(), decoded.greedy, decoded.num_finite)


assert TOKENS[-1] == 1 + MAX_DRAFTS, "the largest shape holds what a plan may ask for"
