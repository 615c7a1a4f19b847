"""Executes plans on the device: copies snapshots, runs the network, commits accepted drafts.

Owns the network's cache and the storage of snapshots, both allocated here and never again. Knows
slots, pages and rows; no requests' parameters and no text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberbox.engine.memory_plan import MemoryPlan
from emberbox.engine.plan import Restore, Save, Work
from emberbox.errors import EnvironmentProblem
from emberbox.model.batch import Batch, SequenceRows
from emberbox.model.cache import CacheSize
from emberbox.model.network import Network
from emberbox.model.snapshots import SnapshotStore

Features = Mapping[int, Tensor]  # position in the sequence -> embedding [hidden]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Rows of one Work that samples: the last certain token's, then one per draft.

    logits [1 + drafts, V] float32 or wider, on the device; greedy: the argmax of each row;
    num_finite: rows before the first that holds a value which is not finite.
    """

    logits: Tensor
    greedy: tuple[int, ...]
    num_finite: int


class ModelRunner:
    """One network with its cache. Every method runs on the engine's thread."""

    def __init__(self, network: Network, memory: MemoryPlan) -> None:
        """Allocates all of `memory`. Raises EnvironmentProblem when that cannot be had."""
        self.network = network
        self.device = network.embedding.device
        try:
            self.cache = network.new_cache(CacheSize(memory.num_pages, memory.num_slots))
            self.snapshots = SnapshotStore(self.cache, memory.num_snapshots)
        except RuntimeError as error:  # torch's word for memory that cannot be had
            raise EnvironmentProblem(
                f"the memory of the plan cannot be had: {error}\n{memory.table()}",
                hint="lower max_model_len, cache_tokens or snapshot_bytes",
            ) from error

    @torch.inference_mode()
    def restore(self, restores: Sequence[Restore]) -> None:
        """Copy snapshots into slots."""
        for restore in restores:
            self.snapshots.restore(restore.snapshot, restore.slot, restore.page)

    @torch.inference_mode()
    def forward(
        self, works: Sequence[Work], features: Mapping[int, Features]
    ) -> dict[int, Sampled]:
        """One forward pass over the work of a plan, whose restores are done.

        `features`: by request, the embeddings that stand for image tokens. Returns what each
        request that samples may choose from.
        """
        rows = [_rows(work, features.get(work.request_id, {})) for work in works]
        batch = Batch.of(rows, self.device)
        hidden = self.network.forward(batch, self.cache)
        sampling = [
            (work.request_id, span.stop - work.num_drafts - 1, span.stop)
            for work, span in zip(works, batch.spans, strict=True)
            if work.samples
        ]
        return self._sampled(hidden, sampling)

    @torch.inference_mode()
    def commit(self, accepted: Mapping[int, int]) -> None:
        """Keep the first `accepted[slot]` drafts of each slot that verified some."""
        self.cache.commit(accepted)

    def discard(self, slot: int) -> None:
        """Forget the drafts of a slot whose request has ended."""
        self.cache.discard(slot)

    @torch.inference_mode()
    def save(self, saves: Sequence[Save]) -> None:
        """Copy slots into snapshots."""
        for save in saves:
            self.snapshots.save(save.snapshot, save.slot, save.page)

    @torch.inference_mode()
    def encode(self, pixel_values: NDArray[np.float32], grid: tuple[int, int, int]) -> Tensor:
        """Embeddings [n, hidden] of one picture or slice. Needs a vision tower."""
        assert self.network.vision is not None, "prompts with pictures were checked"
        pixels = torch.from_numpy(pixel_values).to(self.device)
        return self.network.vision(pixels.to(self.network.embedding.dtype), [grid])

    def _sampled(
        self, hidden: Tensor, sampling: Sequence[tuple[int, int, int]]
    ) -> dict[int, Sampled]:
        """(request, first row, end row) -> logits of those rows, one transfer for all of them."""
        if not sampling:
            return {}
        at = [row for _, start, stop in sampling for row in range(start, stop)]
        logits = self.network.logits(hidden[torch.tensor(at, device=hidden.device)])
        finite = torch.isfinite(logits).all(-1)
        greedy = logits.argmax(-1)
        choices, are_finite = torch.stack([greedy, finite.to(greedy.dtype)]).tolist()
        out: dict[int, Sampled] = {}
        first = 0
        for request_id, start, stop in sampling:
            own = slice(first, first + stop - start)
            num_finite = [*are_finite[own], 0].index(0)
            out[request_id] = Sampled(logits[own], tuple(choices[own]), num_finite)
            first = own.stop
        return out


def _rows(work: Work, features: Features) -> SequenceRows:
    stop = work.position + len(work.token_ids)
    here = {at - work.position: f for at, f in features.items() if work.position <= at < stop}
    return SequenceRows(
        work.token_ids,
        work.position,
        work.slot,
        work.pages,
        num_verify=work.num_drafts,
        features=here,
    )
