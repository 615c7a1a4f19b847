"""Tune a compressed checkpoint against its source: scales and norms by gradient, no trellis.

`prepare_tuning` reads headers and text and refuses what cannot be done; `tune` learns and writes.
What is lowered is KL(source || candidate) over the whole vocabulary, and of all steps that were
judged the best on held-out rows is written. Router biases take part in a choice alone, which has no
gradient; they stay. The command line is not known here.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from emberbox.compress.beside import REPORT_NAME
from emberbox.compress.tune_folder import Contents, check_place, write_folder
from emberbox.compress.tune_memory import require_memory
from emberbox.compress.tune_network import TuningNetwork
from emberbox.compress.tune_operands import Tunable, entries_of, plain_operands, require_tunable
from emberbox.compress.tune_report import TUNING, Outcome, documents_of, report_of
from emberbox.compress.tune_text import RowChoice, TuningText, draws, load_text, warm_up_and_cosine
from emberbox.device import Device
from emberbox.engine.decode_once import decode_once
from emberbox.errors import CheckpointError, MeasureError, SettingsError
from emberbox.model.config import Glm5NextConfig
from emberbox.model.layers import plain
from emberbox.model.parameters import Part
from emberbox.model.weights import Assignment, assign, load_parameters
from emberbox.store.checkpoint import Checkpoint, open_checkpoint
from emberbox.store.checksums import digest_file

log = logging.getLogger(__name__)

TOKENIZER_NAME = "tokenizer.json"
HEAD = "lm_head.weight"
BETAS, WARM_UP = (0.9, 0.98), 20
LR, LR_TOKENS = 3e-3, 8192
EVALUATIONS = 10
RANGES = {  # of TuneOptions; a seed is what torch takes
    "rows": (2, 2**31 - 1),
    "cols": (2, 2**31 - 1),
    "seed": (0, 2**63 - 1),
    "steps": (1, 1_000_000),
    "step_rows": (1, 2**31 - 1),
}
MAX_REFUSED = 5  # steps whose loss or gradient is not finite; each is left out

# B rows of T tokens, n = B T, H hidden, V vocabulary, N values that are tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How a candidate is tuned. text: None for the shipped one; an .npz file holds token ids.

    At most `rows` rows of `cols` tokens, chosen by `seed`, which also orders them; step_rows of
    them a step. lr: the largest step size; None is `rate`. On one device the same options
    give the same bytes.
    """

    text: Path | None = None
    rows: int = 256
    cols: int = 256
    seed: int = 1
    steps: int = 250
    step_rows: int = 8
    lr: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Raises SettingsError for a number out of range."""
        wrong = []
        for name, (least, most) in RANGES.items():
            found = getattr(self, name)
            if not least <= found <= most:
                expected = f"{least} or more" if found < least else f"at most {most:,}"
                wrong.append(f"{name}: {found}, expected {expected}")
        if self.lr is not None and not 0 < self.lr <= 1:
            wrong.append(f"lr: {self.lr}, expected more than 0 and at most 1")
        if wrong:
            raise SettingsError("; ".join(wrong))

    @property
    def rate(self) -> float:
        """The learning rate that is used: LR at LR_TOKENS a step, less for noisier gradients."""
        share = min(1.0, self.step_rows * self.cols / LR_TOKENS)
        return round(LR * math.sqrt(share), 6) if self.lr is None else self.lr


@dataclass(frozen=True, slots=True)
class Side:
    """An opened checkpoint and the tensors of its trunk."""

    checkpoint: Checkpoint
    config: Glm5NextConfig
    trunk: Assignment

    @classmethod
    def open(cls, folder: Path) -> "Side":
        """Raises CheckpointError."""
        checkpoint = open_checkpoint(folder.resolve())
        config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
        found = assign(config, checkpoint.tensors)
        return cls(checkpoint, config, found.without(Part.MTP).without(Part.VISION))


@dataclass(frozen=True, slots=True)
class Tuning:
    """A run that can begin."""

    reference: Side
    candidate: Side
    folder: Path
    text: TuningText
    options: TuneOptions


@dataclass(frozen=True, slots=True)
class Progress:
    """Told to the listener. stage: "reference", "tuning" or "writing"; kl: the newest held-out."""

    stage: str
    done: int
    total: int
    kl: float | None = None


Listener = Callable[[Progress], None]


def prepare_tuning(reference: Path, candidate: Path, folder: Path, options: TuneOptions) -> Tuning:
    """Check both checkpoints against each other, DST, text and memory. Reads no weights.

    Raises SettingsError, CheckpointError, MemoryRefused, EnvironmentProblem.
    """
    source, compressed = Side.open(reference), Side.open(candidate)
    _require_source(source.checkpoint.folder, compressed.checkpoint.folder)
    _require_same_model(source, compressed)
    require_tunable(entries_of(compressed.trunk), candidate)
    check_place(compressed.checkpoint, source.checkpoint.folder, folder)
    choice = RowChoice(options.rows, options.cols, options.seed)
    where, rows = source.checkpoint.folder, options.step_rows
    text = load_text(where, source.config, options.text, choice, rows)
    tokens = options.step_rows * options.cols
    device = Device.detect(options.device)
    require_memory(source.trunk, compressed.trunk, source.config.text, tokens, device)
    return Tuning(source, compressed, folder, text, options)


def tune(prepared: Tuning, listener: Listener = lambda _progress: None) -> Outcome:
    """Learn, and write DST. Raises MeasureError if nothing was gained, then no DST is written."""
    device = torch.device(prepared.options.device)
    teacher = _Teacher.capture(prepared, device, listener)
    compressed = prepared.candidate
    tunable = Tunable.load(compressed.checkpoint, compressed.trunk, device)
    offsets, outcome = _Learner(prepared, teacher, tunable, listener).run()
    new = tunable.stored(offsets)
    contents = Contents(
        {name: value.view(torch.uint8).numpy().tobytes() for name, value in new.items()},
        lambda digest: documents_of(prepared, outcome, digest),
    )
    write_folder(
        compressed.checkpoint,
        prepared.folder,
        contents,
        lambda done, total: listener(Progress("writing", done, total)),
    )
    return outcome


def _require_source(reference: Path, candidate: Path) -> None:
    """Raises SettingsError for a reference that teaches nothing, or what tuning has changed."""
    hint = "the reference is the folder that the candidate was compressed from"
    if reference == candidate:
        raise SettingsError(f"{reference}: is both reference and candidate", hint=hint)
    if TUNING in report_of(reference):
        raise SettingsError(f"{reference}: is itself a tuned copy, by its {REPORT_NAME}", hint=hint)


def _require_same_model(reference: Side, candidate: Side) -> None:
    """Raises CheckpointError unless both have the same trunk, vocabulary and tokenizer."""
    one, other = reference.config.text, candidate.config.text
    names = (field.name for field in fields(one))
    differ = [n for n in names if n != "mtp_experts" and getattr(one, n) != getattr(other, n)]
    if differ:
        said = "; ".join(f"{n}: {getattr(one, n)} and {getattr(other, n)}" for n in differ[:3])
        raise CheckpointError(
            f"{candidate.checkpoint.folder}: is not made of {reference.checkpoint.folder}: {said}",
            hint="the reference is the folder that the candidate was compressed from",
        )
    digests = [_tokenizer(side.checkpoint.folder) for side in (reference, candidate)]
    if digests[0] != digests[1]:
        raise CheckpointError(
            f"{candidate.checkpoint.folder / TOKENIZER_NAME}: sha256 {digests[1]}, that of the "
            f"reference {digests[0]}",
            hint="token ids of one tokenizer mean nothing to another",
        )


def _tokenizer(folder: Path) -> str:
    try:
        return digest_file(folder / TOKENIZER_NAME).sha256
    except OSError as error:
        raise CheckpointError(
            f"{folder / TOKENIZER_NAME}: cannot be read: {error.strerror}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Teacher:
    """The reference's final states of the rows that are used [T, H], on the CPU, and its head."""

    hidden: dict[int, Tensor]
    head: Tensor

    @classmethod
    @torch.no_grad()
    def capture(cls, prepared: Tuning, device: torch.device, listener: Listener) -> "_Teacher":
        """Load the reference, run it, and let it go."""
        side, options, text = prepared.reference, prepared.options, prepared.text
        params = load_parameters(side.checkpoint, side.trunk, device=device, dtype=torch.float32)
        operands = plain_operands(decode_once(params, torch.float32, side.trunk.where))
        num_steps = min(options.steps, -(-len(text.learnt) // options.step_rows))  # then all are
        steps = draws(text.learnt, num_steps, options.step_rows, options.seed)
        used = sorted({*text.held, *(row for step in steps for row in step)})
        hidden: dict[int, Tensor] = {}
        for part in _parts(used, options.step_rows):
            listener(Progress("reference", len(hidden), len(used)))
            ids = text.text.token_ids[part].to(device)
            found = TuningNetwork(side.config, operands, len(part)).hidden(ids)
            hidden |= zip(part, found.view(*ids.shape, -1).cpu(), strict=True)
        return cls(hidden, plain(params, HEAD))

    @torch.no_grad()
    def log_probabilities(self, rows: Sequence[int]) -> Tensor:
        """[n, V] of the tokens of these rows."""
        states = torch.cat([self.hidden[row] for row in rows]).to(self.head.device)
        return log_softmax(states @ self.head.T, -1)


class _Learner:
    """Adam on the offsets of one candidate."""

    def __init__(
        self, prepared: Tuning, teacher: _Teacher, tunable: Tunable, listener: Listener
    ) -> None:
        self._prepared, self._teacher, self._tunable = prepared, teacher, tunable
        self._listener = listener
        self._offsets = torch.zeros_like(tunable.base, requires_grad=True)
        self._adam = torch.optim.Adam([self._offsets], lr=prepared.options.rate, betas=BETAS)
        self._curve: list[tuple[int, float]] = []
        self._num_refused = 0
        self._best = self._offsets.detach().clone()

    def run(self) -> tuple[Tensor, Outcome]:
        """The best offsets [N], and how it went. Raises MeasureError if none beats the start."""
        options, text = self._prepared.options, self._prepared.text
        every = max(1, -(-options.steps // EVALUATIONS))
        self._judge(0)
        order = draws(text.learnt, options.steps, options.step_rows, options.seed)
        for step, rows in enumerate(order):
            self._step(step, rows)
            if (step + 1) % every == 0 or step + 1 == options.steps:
                self._judge(step + 1)
            last = self._curve[-1][1]
            self._listener(Progress("tuning", step + 1, options.steps, last))
        outcome = Outcome(tuple(self._curve), self._num_refused, self._tunable.entries)
        if outcome.best_step == 0:
            raise MeasureError(
                f"tuning did not lower the held-out KL of {outcome.first:.4g} nats; nothing is "
                f"written",
                hint="lower --lr, or give more text or steps",
            )
        return self._best, outcome

    def _step(self, step: int, rows: list[int]) -> None:
        """One step; left out if its loss or gradient is not finite."""
        options = self._prepared.options
        for group in self._adam.param_groups:
            group["lr"] = options.rate * warm_up_and_cosine(step, options.steps, WARM_UP)
        self._adam.zero_grad()
        loss = self._divergence(self._tunable.values(self._offsets), rows).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = self._offsets.grad
        assert gradient is not None
        if bool(torch.isfinite(loss) & torch.isfinite(gradient).all()):
            self._adam.step()
            return
        self._num_refused += 1
        log.warning("step %d: loss or gradient is not finite; it is left out", step + 1)
        if self._num_refused > MAX_REFUSED:
            raise MeasureError(
                f"tuning: {self._num_refused} of {step + 1} steps were not finite",
                hint="lower --lr",
            )

    @torch.no_grad()
    def _judge(self, step: int) -> None:
        """KL on the held-out rows, of the values as they would be stored."""
        held, total = self._prepared.text.held, 0.0
        values = self._tunable.rounded(self._offsets)
        for part in _parts(held, self._prepared.options.step_rows):
            total += float(self._divergence(values, part).sum(dtype=torch.float64))
        kl = total / (len(held) * self._prepared.options.cols)
        if not self._curve or kl < min(each for _, each in self._curve):
            self._best = self._offsets.detach().clone()
        self._curve.append((step, kl))
        log.info("step %d: held-out KL %.5f nats", step, kl)

    def _divergence(self, values: Tensor, rows: Sequence[int]) -> Tensor:
        """KL(reference || candidate) at each token of these rows [n]."""
        config = self._prepared.candidate.config
        ids = self._prepared.text.text.token_ids[list(rows)].to(values.device)
        network = TuningNetwork(config, self._tunable.operands(values), len(rows))
        own = log_softmax(network.logits(network.hidden(ids)), -1)
        target = self._teacher.log_probabilities(rows)
        return (target.exp() * (target - own)).sum(-1)


def _parts(rows: Sequence[int], size: int) -> list[list[int]]:
    """Rows, `size` of them at once."""
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
