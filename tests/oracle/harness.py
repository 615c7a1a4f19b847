"""A network beside transformers on one small checkpoint, and a cache driven by hand."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from emberbox.model.batch import Batch, SequenceRows
from emberbox.model.cache import PAGE_TOKENS, Cache, CacheSize
from emberbox.model.config import Glm5NextConfig
from emberbox.model.network import Network
from emberbox.model.weights import assign, load_parameters
from emberbox.ops.table import OpTable, bind_all
from emberbox.store.checkpoint import open_checkpoint
from tests.oracle import checkpoints

CPU = torch.device("cpu")
# Largest difference of a logit, float32. Measured up to 2.8e-4 and 6e-6; transformers' own noise
# (a cached against a full pass) is 2.5e-4 and 5e-6.
TOLERANCE = {"sharp": 1e-3, "calm": 2e-5}
NUM_TEXT_TOKENS = checkpoints.NUM_TEXT_TOKENS
LOWEST = torch.finfo(torch.float32).min  # the score of what may not be chosen
TABLES = {"reference": OpTable.reference, "cpu": lambda: bind_all(CPU)}


def load_network(folder: Path, ops: OpTable) -> Network:
    checkpoint = open_checkpoint(folder)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    assignment = assign(config, checkpoint.tensors)
    params = load_parameters(checkpoint, assignment, device=CPU, dtype=torch.float32)
    return Network(config, params, ops)


@dataclass(frozen=True)
class Run:
    """Hidden states [T, hidden] after the final norm, logits [T, vocab], and how near a tie was."""

    hidden: Tensor
    logits: Tensor
    margin: float


@dataclass
class Oracle:
    """transformers on one checkpoint. Logits of a sequence are computed once."""

    weights: str
    folder: Path
    model: torch.nn.Module = field(init=False, repr=False)
    seen: dict[tuple[int, ...], Run] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.model = checkpoints.open_reference(self.folder)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.weights]

    def run(self, token_ids: Tensor, **media: Tensor) -> Run:
        key = tuple(token_ids.tolist())
        if media or key not in self.seen:
            with margins() as gaps, torch.inference_mode():
                hidden = self.model.model(input_ids=token_ids[None], **media).last_hidden_state[0]
                logits = self.model.lm_head(hidden)
            self.seen[key] = Run(hidden, logits, min(gaps, default=1.0))
        return self.seen[key]

    def logits(self, token_ids: Tensor) -> Tensor:
        return self.run(token_ids).logits

    def token_ids(self, length: int, seed: int = 0, prefix: Tensor | None = None) -> Tensor:
        """Random text tokens [length] that begin with `prefix`, no choice in them close to a tie.

        Where two pools or two experts are as good as equal, either choice is right and the logits
        of both are far apart.
        """
        generator = torch.Generator().manual_seed(seed)
        prefix = torch.empty(0, dtype=torch.int64) if prefix is None else prefix
        for _ in range(50):
            tail = torch.randint(NUM_TEXT_TOKENS, (length - len(prefix),), generator=generator)
            ids = torch.cat([prefix, tail])
            if self.run(ids).margin >= self.tolerance / 50:
                return ids
        raise LookupError(f"50 sequences of {length} tokens, and each is close to a tie")

    def check(self, logits: Tensor, token_ids: Tensor, start: int = 0) -> None:
        """`logits` are those of positions start.. of the sequence."""
        expected = self.logits(token_ids)[start : start + logits.shape[0]]
        assert logits.shape == expected.shape
        error = difference(logits, expected)
        assert error <= self.tolerance, f"logits differ by {error:.2e}, {self.tolerance} allowed"


@contextmanager
def margins() -> Iterator[list[float]]:
    """Collects, of every choice of the k best, the smallest lead over the next best."""
    gaps: list[float] = []
    original = torch.Tensor.topk

    def topk(scores: Tensor, k: int, *args: object, **kwargs: object) -> object:
        if k != 2 and scores.shape[-1] > k:  # 2 is the group limiting, which does nothing here
            best = scores.sort(dim=-1, descending=True).values
            lead = best[..., k - 1] - best[..., k]
            gaps.append(float(lead.masked_fill(best[..., k] <= LOWEST, 1.0).min()))
        return original(scores, k, *args, **kwargs)

    with patch.object(torch.Tensor, "topk", topk), patch.object(torch, "topk", topk):
        yield gaps


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference; infinite when `actual` is not finite."""
    if not actual.isfinite().all():
        return float("inf")
    return float(torch.nn.functional.pad((actual - expected).abs().flatten(), (0, 1)).max())


@dataclass(frozen=True)
class Rows:
    """New tokens of one sequence."""

    token_ids: Tensor
    num_verify: int = 0
    features: Mapping[int, Tensor] = field(default_factory=dict)


class Sequences:
    """Sequences in one cache; its memory starts as NaN, its pages are handed out backwards."""

    def __init__(self, network: Network, num_slots: int = 1, max_tokens: int = 384) -> None:
        self.network = network
        pages = -(-max_tokens // PAGE_TOKENS)
        size = CacheSize(num_pages=num_slots * pages, num_slots=num_slots)
        self.cache = network.new_cache(size)
        for tensor in tensors(self.cache):
            tensor.fill_(float("nan"))
        free = range(size.num_pages - 1, -1, -1)
        self.pages = {slot: tuple(free[slot::num_slots]) for slot in range(num_slots)}
        self.lengths = dict.fromkeys(range(num_slots), 0)

    def restart(self, slot: int) -> None:
        """A new sequence in a slot and pages that another one has used."""
        self.lengths[slot] = 0

    @torch.inference_mode()
    def step(self, work: Mapping[int, Rows]) -> dict[int, Tensor]:
        """Run new tokens of each slot; logits [n, vocab] by slot."""
        rows = [
            SequenceRows(
                new.token_ids.tolist(),
                self.lengths[slot],
                slot,
                self.pages[slot],
                new.num_verify,
                new.features,
            )
            for slot, new in work.items()
        ]
        batch = Batch.of(rows, CPU)
        logits = self.network.logits(self.network.forward(batch, self.cache))
        for slot, new in work.items():
            self.lengths[slot] += len(new.token_ids) - new.num_verify
        parts = zip(work, batch.spans, strict=True)
        return {slot: logits[span.start : span.stop] for slot, span in parts}

    def feed(self, token_ids: Tensor, sizes: Sequence[int], slot: int = 0) -> Tensor:
        """Logits of a sequence run in pieces of these sizes."""
        assert sum(sizes) == len(token_ids)
        pieces = token_ids.split(list(sizes))
        return torch.cat([self.step({slot: Rows(piece)})[slot] for piece in pieces])

    def commit(self, accepted: Mapping[int, int]) -> None:
        self.cache.commit(accepted)
        for slot, count in accepted.items():
            self.lengths[slot] += count


def tensors(cache: Cache) -> Iterator[Tensor]:
    """Every tensor a cache keeps between passes."""
    names = ("state", "conv", "latents", "pooled", "ring_keys", "ring_gates")
    yield from (getattr(cache, name) for name in names)


def snapshot(cache: Cache) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors(cache)]


def restore(cache: Cache, before: Sequence[Tensor]) -> None:
    for tensor, then in zip(tensors(cache), before, strict=True):
        tensor.copy_(then)


def same_bits(cache: Cache, before: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(now.view(torch.uint8), then.view(torch.uint8))
        for now, then in zip(tensors(cache), before, strict=True)
    )
