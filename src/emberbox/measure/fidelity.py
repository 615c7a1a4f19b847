"""How far a candidate is from a reference on a panel, at every position, in one lane.

The reference's final hidden states are captured once; the candidate is loaded and run several
times, cold. Logits exist for one block of positions at a time. Knows no record and no receipt.
"""

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from emberbox.device import Device
from emberbox.engine.loading import ONE_THREAD_MAX_HIDDEN
from emberbox.errors import SettingsError
from emberbox.measure.artifact import artifact
from emberbox.measure.capture import Capture, capture
from emberbox.measure.lanes import LANES, Head, Lane, runner_of
from emberbox.measure.metrics import Positions, position_metrics
from emberbox.measure.panel import Panel, Window
from emberbox.measure.preflight import check_artifacts
from emberbox.model.config import Glm5NextConfig
from emberbox.model.network import Network
from emberbox.store.buffers import byte_view

# Logits of so many positions exist at once, and of no more than fit into the bytes: those of both
# models, float32. 256 x 154,880 are 151 MiB of each.
POSITION_BLOCK = 256
LOGITS_BYTES = 512 << 20

WindowPositions = tuple[tuple[str, Positions], ...]  # by window id


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityOptions:
    """lane: "weights" or "served". device: auto, cpu, cuda or cuda:N. runs: cold ones of the
    candidate. capture_dir: where the reference's states are kept; None keeps none. chunk: tokens of
    a step of prefill, in the lane "served"."""

    lane: str = "weights"
    device: str = "auto"
    runs: int = 2
    capture_dir: Path | None = None
    chunk: int = 512

    def __post_init__(self) -> None:
        if self.lane not in LANES:
            raise SettingsError(f"lane: {self.lane!r}", hint=f"expected {' or '.join(LANES)}")
        if not 1 <= self.runs <= 100:
            raise SettingsError(f"runs: {self.runs}, expected 1 to 100")
        if not 1 <= self.chunk <= 65536:
            raise SettingsError(f"chunk: {self.chunk}, expected 1 to 65536")


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` units of a stage, from 0 on: bytes to hash, or windows."""

    stage: str
    done: int
    total: int


OnProgress = Callable[[Progress], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """What was measured, and what it depends on: parts of a receipt.

    runs: the figures of each cold run of the candidate. settings: beside those of the lane the
    capture that was used, and the hash of the candidate's hidden states in each run.
    """

    runs: tuple[WindowPositions, ...]
    reference: Mapping[str, object]
    candidate: Mapping[str, object]
    lane: str
    device: Mapping[str, object]
    op_table: Mapping[str, str]
    settings: Mapping[str, object]


def measure_fidelity(
    reference: Path,
    candidate: Path,
    panel: Panel,
    options: FidelityOptions | None = None,
    on_progress: OnProgress = lambda _: None,
) -> Fidelity:
    """Compare two checkpoint folders on `panel`.

    A folder against itself gives exactly 0 and full agreement, in both lanes. Beyond the loaded
    candidate it takes the reference's head as it is stored and 1.1 GiB (vocabulary 154,880).
    Raises MeasureError for artifacts and panel that do not fit, before any work; CheckpointError;
    MemoryRefused; EnvironmentProblem if captures cannot be written.
    """
    options = options or FidelityOptions()
    longest = max(len(window.token_ids) for window in panel.windows)
    lane = Lane(options.lane, Device.detect(options.device), options.chunk, longest)
    config = check_artifacts({"reference": reference, "candidate": candidate}, panel, lane)
    if lane.device.kind == "cpu" and config.text.hidden_size <= ONE_THREAD_MAX_HIDDEN:
        torch.set_num_threads(1)  # as the engine does: two would wait for each other
    one = _hashed(reference, "hashing the reference", on_progress)
    other = _hashed(candidate, "hashing the candidate", on_progress)
    with TemporaryDirectory(prefix="emberbox-capture-") as scratch:
        states = _Reference(reference, one, lane, panel, config)
        captured = states.capture(options.capture_dir or Path(scratch), on_progress)
        again = _Candidate(candidate, lane, panel, captured, lane.load_head(reference))
        stages = [f"candidate, run {i + 1} of {options.runs}" for i in range(options.runs)]
        passes = [again.run(stage, on_progress) for stage in stages]
    return Fidelity(
        runs=tuple(each.windows for each in passes),
        reference=one,
        candidate=other,
        lane=lane.name,
        device=Device.detect(options.device).describe(),  # the engine has set its threads
        op_table=passes[0].ops,
        settings={
            **lane.describe(),
            "position_block": position_block(config.text.vocab_size),
            "capture": {"key": captured.key, "sha256": captured.sha256},
            "hidden_sha256": [each.hidden_sha256 for each in passes],
        },
    )


@torch.inference_mode()
def compare_networks(
    reference: Network,
    candidate: Network,
    panel: Panel,
    on_window: Callable[[], object] = lambda: None,
) -> WindowPositions:
    """The figures of the lane `weights` for two networks in memory (see lanes.plain_network), on
    one device. For search and research: nothing is hashed, and no receipt comes of it."""
    one, other = runner_of(reference), runner_of(candidate)
    found = []
    for window in panel.windows:
        hidden = one.hidden(window.token_ids)[:-1], other.hidden(window.token_ids)[:-1]
        found.append((window.id, window_positions(window, hidden, (one.head, other.head))))
        on_window()
    return tuple(found)


def position_block(vocabulary: int) -> int:
    """Positions whose logits exist at once."""
    return max(1, min(POSITION_BLOCK, LOGITS_BYTES // (2 * 4 * vocabulary)))


def window_positions(
    window: Window, hidden: tuple[Tensor, Tensor], heads: tuple[Head, Head]
) -> Positions:
    """hidden: states [T - 1, H] of reference and candidate, on one device."""
    targets = torch.tensor(window.token_ids[1:], dtype=torch.int64, device=hidden[0].device)
    pieces, block = [], position_block(heads[0].linear.weight.shape[0])
    for start in range(0, window.num_positions, block):
        rows = slice(start, start + block)
        logits = [head.logits(states[rows]) for head, states in zip(heads, hidden, strict=True)]
        pieces.append(position_metrics(logits[0], logits[1], targets[rows]))
    return Positions.join(pieces)


@dataclass(frozen=True, slots=True)
class _Reference:
    """What a capture is of."""

    folder: Path
    artifact: Mapping[str, object]
    lane: Lane
    panel: Panel
    config: Glm5NextConfig

    def capture(self, kept: Path, on_progress: OnProgress) -> Capture:
        """From `kept`, or computed now."""
        width = self.config.text.hidden_size
        facts = {
            "map_sha256": self.artifact["map_sha256"],
            "config_sha256": self.artifact["config_sha256"],
            "panel_sha256": self.panel.sha256,
            "lane": self.lane.name,
            **self.lane.describe(),
            "device": [self.lane.device.kind, self.lane.device.name, _num_threads(self.lane)],
        }
        shapes = {w.id: (w.num_positions, width) for w in self.panel.windows}
        return capture(kept, facts, shapes, self.lane.dtype, lambda: self._states(on_progress))

    @torch.inference_mode()
    def _states(self, on_progress: OnProgress) -> Iterator[Tensor]:
        runner, total = self.lane.open(self.folder), len(self.panel.windows)
        for done, window in enumerate(self.panel.windows):
            on_progress(Progress("reference", done, total))
            yield runner.hidden(window.token_ids)[:-1]
        on_progress(Progress("reference", total, total))


def _num_threads(lane: Lane) -> int:
    """That states are computed with; 0 on a GPU, where they change nothing."""
    return torch.get_num_threads() if lane.device.kind == "cpu" else 0


@dataclass(frozen=True, slots=True)
class _Pass:
    windows: WindowPositions
    ops: Mapping[str, str]
    hidden_sha256: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What is run against captured states. head: the reference's."""

    folder: Path
    lane: Lane
    panel: Panel
    captured: Capture
    head: Head

    @torch.inference_mode()
    def run(self, stage: str, on_progress: OnProgress) -> _Pass:
        """From loading to figures."""
        gc.collect()  # the network of the run before is gone, also where it held itself
        runner, total = self.lane.open(self.folder), len(self.panel.windows)
        found, hasher = [], hashlib.sha256()
        for done, window in enumerate(self.panel.windows):
            on_progress(Progress(stage, done, total))
            own = runner.hidden(window.token_ids)[:-1].contiguous()
            hasher.update(byte_view(own.cpu().view(torch.uint8).numpy()))
            hidden = self.captured.hidden(window.id).to(own.device), own
            found.append((window.id, window_positions(window, hidden, (self.head, runner.head))))
        on_progress(Progress(stage, total, total))
        return _Pass(tuple(found), runner.ops, hasher.hexdigest())


def _hashed(folder: Path, stage: str, on_progress: OnProgress) -> dict[str, object]:
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    done = 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_progress(Progress(stage, done, total))

    on_bytes(0)
    return artifact(folder, on_bytes)
