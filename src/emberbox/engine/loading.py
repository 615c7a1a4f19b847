"""A checkpoint folder as a network in memory: checked, planned, then read. Knows no requests."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from emberbox.chat.media_settings import PREPROCESSOR_FILE, MediaSettings
from emberbox.device import Device
from emberbox.engine.decode_once import decode_once, prepare_once
from emberbox.engine.memory_plan import MemoryPlan, plan_memory
from emberbox.errors import MemoryRefused
from emberbox.model.config import Glm5NextConfig
from emberbox.model.network import Network
from emberbox.model.parameters import Part
from emberbox.model.step_sizes import reads_pages
from emberbox.model.weights import Assignment, assign, load_parameters
from emberbox.ops.table import OpTable, bind_all
from emberbox.settings import EngineSettings
from emberbox.store.checkpoint import open_checkpoint

# At ember-nano's width a second thread gains nothing (decode 57 tokens/s with one, 55 with two; two
# idle Xeon cores, 2026-11-30), and on busy cores the threads wait for each other.
ONE_THREAD_MAX_HIDDEN = 512
# Products that a decode step of fixed shape takes as plain tensors.
SMALL_WEIGHTS = tuple(
    f"self_attn.{name}.weight"
    for name in (
        *("f_a_proj", "g_a_proj", "b_proj", "f_b_proj", "g_b_proj"),
        *("indexer.wk", "indexer.weights_proj"),
    )
)


class LoadListener(Protocol):
    """Hears how a checkpoint is loaded: the plan before a byte is read, then each tensor's size."""

    def planned(self, memory: MemoryPlan, num_bytes: int) -> None: ...

    def read(self, num_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A network, and the plan its engine follows."""

    network: Network
    memory: MemoryPlan


def load(folder: Path, settings: EngineSettings, listener: LoadListener | None = None) -> Loaded:
    """Raises CheckpointError (every reason named), SettingsError or MemoryRefused; all but what
    only the bytes show (damage, values that are not finite) before a byte of weights is read.

    Weights in a format that a kernel of the device reads are prepared for it. Other quantised
    weights are decoded once, if the plan has room for that. Sets torch's threads, which are the
    process's.
    """
    found = Device.detect(settings.device)
    device = torch.device(found.torch_name)
    dtype = _dtype(settings.dtype, device)
    checkpoint = open_checkpoint(folder, verify=settings.verify_weights)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    assignment = assign(config, checkpoint.tensors)
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    elif found.kind == "cpu" and config.text.hidden_size <= ONE_THREAD_MAX_HIDDEN:
        torch.set_num_threads(1)
    ops = bind_all(device, found.capability or (0, 0))
    kept = frozenset(filter(ops.reads, assignment.quantised_formats))
    graphs = has_graphs(device, ops, config, assignment, kept)
    planner = _Planner(
        config, assignment, found.free_memory_bytes(), dtype, settings, folder, kept, graphs
    )
    memory, is_decoded = planner.plan()
    if listener is not None:
        listener.planned(memory, assignment.num_bytes)
    on_bytes = None if listener is None else listener.read
    params = load_parameters(checkpoint, assignment, device=device, dtype=dtype, on_bytes=on_bytes)
    if is_decoded:
        params = decode_once(params, dtype, assignment.where, kept=kept)
    network = Network(config, prepare_once(params, ops), ops)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was needed to prepare weights
    return Loaded(network, memory)


def has_graphs(
    device: torch.device,
    ops: OpTable,
    config: Glm5NextConfig,
    assignment: Assignment,
    kept: frozenset[str],
) -> bool:
    """Whether decode steps will be CUDA graphs, as `ModelRunner` decides of the network to be.

    Its weights in formats that are not `kept` are decoded.
    """
    return (
        device.type == "cuda"
        and reads_pages(config.text, ops)
        and not any(
            piece.format_name in kept and piece.parameter.name.endswith(SMALL_WEIGHTS)
            for placement in assignment.placements
            for piece in placement.pieces
            if placement.part is Part.TRUNK
        )
    )


@dataclass(frozen=True, slots=True)
class _Planner:
    config: Glm5NextConfig
    assignment: Assignment
    available_bytes: int
    dtype: torch.dtype
    settings: EngineSettings
    folder: Path
    kept: frozenset[str]  # formats that kernels read
    has_graphs: bool

    def plan(self) -> tuple[MemoryPlan, bool]:
        """The plan, and whether the other formats' weights are decoded: if there is room."""
        if self.assignment.quantised_formats - self.kept:
            try:
                return self._plan(decoded=True), True
            except MemoryRefused:
                pass  # as they are stored, slowly
        return self._plan(decoded=False), False

    def _plan(self, *, decoded: bool) -> MemoryPlan:
        plan = plan_memory(
            self.config,
            weight_bytes=self.assignment.loaded_bytes(
                self.dtype.itemsize, decoded=decoded, kept=self.kept
            ),
            available_bytes=self.available_bytes,
            dtype=self.dtype,
            settings=self.settings,
            max_image_tokens=self._max_image_tokens(),
            is_prepared=bool(self.assignment.quantised_formats & self.kept),
            has_graphs=self.has_graphs,
        )
        formats = self.assignment.quantised_formats
        if not formats:
            return plan
        said = ["as they are stored (prepared)"] if formats & self.kept else []
        if formats - self.kept:
            said.append("decoded once, at load" if decoded else "as they are stored")
        note = ", the rest ".join(said)
        return replace(plan, lines=(replace(plan.lines[0], note=note), *plan.lines[1:]))

    def _max_image_tokens(self) -> int:
        """Of one picture; a folder without picture settings is planned with the released ones."""
        has_settings = (self.folder / PREPROCESSOR_FILE).exists()
        media = MediaSettings.open(self.folder) if has_settings else MediaSettings()
        return media.max_image_tokens


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if name == "float32" else torch.bfloat16
