"""Executes plans on the device: copies snapshots, runs the network, commits accepted drafts.

Owns the network's cache and the storage of snapshots, both allocated here and never again. Knows
slots, pages and rows; no requests' parameters and no text.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberbox.engine.decode_runner import Decoded, DecodeRunner
from emberbox.engine.memory_plan import MemoryPlan
from emberbox.engine.plan import MAX_DRAFTS, Restore, Save, Work
from emberbox.engine.sampler import warm_up
from emberbox.errors import EnvironmentProblem
from emberbox.model.batch import Batch, SequenceRows
from emberbox.model.cache import Cache, CacheSize
from emberbox.model.decode_step import MAX_ROWS, DecodeStep
from emberbox.model.network import Network
from emberbox.model.snapshots import SnapshotStore
from emberbox.model.step_sizes import reads_pages

Features = Mapping[int, Tensor]  # position in the sequence -> embedding [hidden]
FILL_SCALE = 0.1  # of KDA states of random content
Sampled = Decoded  # rows of one Work that samples: the last certain token's, then one per draft


class ModelRunner:
    """One network with its cache. Every method runs on the engine's thread."""

    def __init__(
        self, network: Network, memory: MemoryPlan, *, fixed_shapes: bool | None = None
    ) -> None:
        """Allocates all of `memory`. Raises EnvironmentProblem when that cannot be had.

        fixed_shapes: decode steps by DecodeRunner; None where that gains: on a GPU, as graphs.
        """
        self.network, self.device = network, network.embedding.device
        is_cuda, text = self.device.type == "cuda", network.config.text
        if fixed_shapes is None:
            fixed_shapes = is_cuda and reads_pages(text, network.ops) and DecodeStep.can(network)
        try:
            size = CacheSize(memory.num_pages, memory.num_slots)
            self.cache = network.new_cache(size, memory.latent_dtype)
            self.snapshots = SnapshotStore(self.cache, memory.num_snapshots)
        except RuntimeError as error:  # torch's word for memory that cannot be had
            raise _cannot_be_had(memory, error) from error
        try:
            self.decoder = _decoder(network, self.cache, memory) if fixed_shapes else None
            if is_cuda:
                warm_up(network.ops.sample_rows, self.device, text.vocab_size)
        except RuntimeError as error:
            if "out of memory" not in str(error):  # the driver's own words, and torch's
                raise
            raise _cannot_be_had(memory, error) from error

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
        decoder = self.decoder
        if decoder is None:
            return self._forward(works, features)
        steps: list[Work] = []
        others: list[Work] = []
        for work in works:
            # A lone image token at the end of a prompt looks like a step, and has an embedding.
            has_feature = work.position in features.get(work.request_id, {})
            (steps if decoder.takes(work) and not has_feature else others).append(work)
        out = self._forward(others, features) if others else {}
        return {**out, **decoder.run(steps)} if steps else out

    def _forward(
        self, works: Sequence[Work], features: Mapping[int, Features]
    ) -> dict[int, Sampled]:
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
        if self.decoder is not None:
            self.decoder.commit(accepted)

    def max_drafts(self, num_running: int) -> int:
        """Drafts that a sequence may verify in one step where so many run."""
        return MAX_DRAFTS if self.decoder is None else self.decoder.max_drafts(num_running)

    def discard(self, slot: int) -> None:
        """Forget the drafts of a slot whose request has ended."""
        self.cache.discard(slot)

    @torch.inference_mode()
    def save(self, saves: Sequence[Save]) -> None:
        """Copy slots into snapshots."""
        for save in saves:
            self.snapshots.save(save.snapshot, save.slot, save.page)

    @torch.inference_mode()
    def fill_random(self, slot: int, pages: Sequence[int], seed: int) -> None:
        """As if a sequence had left something there: for measurements at a context's length."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def random(like: Tensor) -> Tensor:
            made = torch.randn(like.shape, generator=generator, device=self.device)
            return made.to(like.dtype)

        cache = self.cache
        for tensor in (cache.state, cache.conv, cache.ring_keys, cache.ring_gates):
            tensor[:, slot] = random(tensor[:, slot]) * FILL_SCALE
        for page in pages:
            for tensor in (cache.latents, cache.pooled):
                tensor[:, page] = random(tensor[:, page])
            if cache.scales is not None:
                cache.scales[:, page] = 1

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
        pieces = [self.network.ops.greedy_rows(rows) for rows in torch.split(logits, MAX_ROWS)]
        greedy, finite = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        choices, are_finite = torch.stack([greedy, finite.long()]).tolist()
        out: dict[int, Sampled] = {}
        first = 0
        for request_id, start, stop in sampling:
            own = slice(first, first + stop - start)
            num_finite = [*are_finite[own], 0].index(0)
            out[request_id] = Sampled(logits[own], tuple(choices[own]), num_finite)
            first = own.stop
        return out


def _decoder(network: Network, cache: Cache, memory: MemoryPlan) -> DecodeRunner:
    most = {"max_running": memory.num_slots, "max_model_len": memory.max_model_len}
    return DecodeRunner(network, cache, **most)


def _cannot_be_had(memory: MemoryPlan, error: RuntimeError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"the memory of the plan cannot be had: {error}\n{memory.table()}",
        hint="lower max_model_len, cache_tokens or snapshot_bytes",
    )


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
