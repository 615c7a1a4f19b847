"""Compress a checkpoint by a recipe: everything is planned and checked, then written unit by unit.

`prepare` reads headers, recipe and calibration text and refuses what cannot be done. `compress`
writes; killed at any time, the same call with `resume` goes on after the last complete unit and
ends in the same bytes. The engine and the command line are not known here.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from rich.filesize import decimal
from torch import Tensor

from emberbox import __version__
from emberbox.compress.beside import (
    GROUP_BYTES,
    REPORT_NAME,
    config_of,
    files_of,
    report_of,
    require_same,
)
from emberbox.compress.calibration import Calibration, load_calibration
from emberbox.compress.conversion_items import Item
from emberbox.compress.conversion_plan import ConversionPlan, plan_conversion
from emberbox.compress.describe import card_of
from emberbox.compress.encode import Encoded, Encoder
from emberbox.compress.journal import JOURNAL_NAME, Job
from emberbox.compress.keep_map import Heaviest
from emberbox.compress.moments import unknown
from emberbox.compress.output import Output
from emberbox.compress.quantize_exl3 import group_bytes
from emberbox.compress.recipe import Recipe
from emberbox.compress.routing import moments_bytes
from emberbox.compress.routing_mass import RoutingMass, routing_mass
from emberbox.compress.source import EXPERTS, Source
from emberbox.compress.trellis_steps import Search
from emberbox.compress.walk import Walk, activation_bytes
from emberbox.device import Device
from emberbox.errors import CheckpointError, MemoryRefused, SettingsError
from emberbox.model.config import Glm5NextConfig
from emberbox.model.parameters import Part
from emberbox.store.buffers import Buffer
from emberbox.store.checkpoint import Checkpoint, open_checkpoint
from emberbox.store.checksums import SUMS_NAME, verify_checksums

log = logging.getLogger(__name__)

LAYER = "layer-"
REACHED = (LAYER, "head", "mtp")  # units that the calibration text passes
MIN_COLS = 2  # the MTP layer needs a next token


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressOptions:
    """How a result is made.

    text: calibration text, None for the shipped one; at most `rows` rows of `cols` tokens, chosen
    by `seed`. device: a CPU and a GPU sum in other orders, and so find other paths now and then.
    group_bytes: of memory for the matrices that are searched together; it changes the order of
    tensors in a file, no tensor.
    """

    text: Path | None = None
    rows: int = 128
    cols: int = 512
    seed: int = 0
    max_shard_bytes: int = 8 << 30
    device: str = "cpu"
    group_bytes: int = GROUP_BYTES
    resume: bool = False

    def __post_init__(self) -> None:
        """Raises SettingsError for a number that is too small."""
        least = {"rows": 1, "cols": MIN_COLS, "seed": 0, "max_shard_bytes": 1, "group_bytes": 1}
        found = {name: getattr(self, name) for name in least}
        low = [
            f"{n}: {found[n]}, expected {least[n]} or more" for n in least if found[n] < least[n]
        ]
        if low:
            raise SettingsError("; ".join(low))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversion that can begin.

    calibration: None where the recipe needs no search. mass: of the source's experts, where that
    tells which of them stay.
    """

    checkpoint: Checkpoint
    config: Glm5NextConfig
    plan: ConversionPlan
    calibration: Calibration | None
    options: CompressOptions
    mass: RoutingMass | None = None

    @property
    def how(self) -> str:
        """Digest of all that decides the result, the weights of the source aside."""
        options = self.options
        text = self.calibration.sha256 if self.calibration else ""
        chosen = (options.rows, options.cols, options.seed, options.group_bytes)
        kind = options.device.partition(":")[0]  # sums differ in their last bits
        whole = f"{self.plan.digest} {text} {chosen} {kind} {__version__}"
        return hashlib.sha256(whole.encode()).hexdigest()

    @property
    def job(self) -> Job:
        """What the output folder is told."""
        options = self.options
        units = self.plan.groups()
        text = self.calibration.sha256 if self.calibration else ""
        digest = hashlib.sha256(f"{self.how} {_identity(self.checkpoint)}".encode())
        chosen = (options.rows, options.cols, options.seed, options.group_bytes)
        return Job(
            plan_digest=digest.hexdigest(),
            unit_bytes={name: sum(i.num_bytes for i in items) for name, items in units.items()},
            max_shard_bytes=options.max_shard_bytes,
            state_bytes=self.state_bytes,
            about={
                "recipe": self.plan.recipe.name,
                "source": self.checkpoint.folder.name,
                "calibration": text[:16],
                "rows, cols, seed, group_bytes": repr(chosen),
                "device": options.device,
                "emberbox": __version__,
            },
        )

    @property
    def state_bytes(self) -> int:
        """Of the calibration text between two layers, on disk."""
        if self.calibration is None:
            return 0
        text = self.config.text
        item = 4 if self.options.device == "cpu" else 2
        return self.calibration.token_ids.numel() * text.hc_mult * text.hidden_size * item

    @property
    def search_bytes(self) -> int:
        """Of memory for the matrices that are searched together: one is, whatever it takes."""
        options = self.options
        shapes = {item.shape for item in self.plan.items if item.target.format == "exl3"}
        alone = (group_bytes(1, shape[1], shape[0], options.device) for shape in shapes)
        return max(options.group_bytes, *alone) if shapes else 0

    @property
    def moments_bytes(self) -> int:
        """Of memory for the moments and weights of a group of routed experts."""
        if self.calibration is None:
            return 0
        options, layers = self.options, dict[str, list[Item]]()
        for item in self.plan.items:
            if EXPERTS in item.name:
                layers.setdefault(item.unit, []).append(item)
        shrink = self.plan.recipe.shrink_tokens
        chosen = (options.device, options.group_bytes, shrink)
        return max((moments_bytes(items, *chosen) for items in layers.values()), default=0)

    @property
    def activation_bytes(self) -> int:
        """Of memory for the calibration text."""
        if self.calibration is None:
            return 0
        item = 4 if self.options.device == "cpu" else 2
        return activation_bytes(self.config.text, self.calibration.token_ids.numel(), item)


@dataclass(slots=True)
class Progress:
    """Told to the listener after every item."""

    unit: str
    done_weights: int
    total_weights: int


Listener = Callable[[Progress], None]


def prepare(source: Path, recipe: Recipe, options: CompressOptions) -> Prepared:
    """Read headers and text, plan and check; where routing mass decides, the text passes as well.

    Raises LoadRefused, SettingsError, CheckpointError, and for that MemoryRefused.
    """
    checkpoint = open_checkpoint(source.resolve())
    config = Glm5NextConfig.from_dict(checkpoint.config)
    plan = plan_conversion(config, checkpoint.tensors, recipe)
    is_text_needed = _is_searched(plan) or isinstance(recipe.keep, Heaviest)
    chosen = (options.rows, options.cols, options.seed)
    text = load_calibration(source, options.text, *chosen) if is_text_needed else None
    prepared = Prepared(checkpoint, config, plan, text, options)
    if text is None or not isinstance(recipe.keep, Heaviest):
        return prepared
    return _with_heaviest(prepared, recipe.keep.count, text)


def _is_searched(plan: ConversionPlan) -> bool:
    """Whether there is a trellis that the calibration text decides."""
    return any(i.target.format == "exl3" and i.part is not Part.VISION for i in plan.items)


def _with_heaviest(prepared: Prepared, count: int, text: Calibration) -> Prepared:
    """Planned anew with the experts that bear most of the routing of `text`."""
    _require_memory(prepared)
    source = Source(prepared.checkpoint, prepared.config)
    mass = routing_mass(source, text, torch.device(prepared.options.device))
    keep = mass.heaviest(count)
    recipe = replace(prepared.plan.recipe, keep=keep)
    plan = plan_conversion(prepared.config, prepared.checkpoint.tensors, recipe)
    plan = replace(plan, notes=(*plan.notes, *mass.notes(keep)))
    calibration = text if _is_searched(plan) else None
    return replace(prepared, plan=plan, calibration=calibration, mass=mass)


def compress(
    prepared: Prepared,
    folder: Path,
    search: Search,
    listener: Listener = lambda _progress: None,
    on_verify: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Write the result to `folder`. Raises what Output and Encoder raise, by unit or tensor."""
    options = prepared.options
    if options.resume and (folder / SUMS_NAME).exists() and not (folder / JOURNAL_NAME).exists():
        require_same(prepared, folder)
        log.warning("%s is complete already: %d files fit", folder, verify_checksums(folder))
        return
    _require_memory(prepared)
    job = prepared.job
    with Output.open(
        folder,
        job,
        source=prepared.checkpoint.folder,
        resume=options.resume,
        on_progress=on_verify,
    ) as output:
        _Run(prepared, output, search, listener).units()
        reports = {
            name: report
            for unit in job.unit_bytes
            for name, report in output.note(unit).get("reports", {}).items()
        }
        files = files_of(prepared) | {REPORT_NAME: report_of(prepared, reports)}
        output.finish(config_of(prepared), files, card_of(prepared, folder.name, reports))


def _require_memory(prepared: Prepared) -> None:
    """Raises MemoryRefused if what the plan counts is more than there is."""
    needed = prepared.activation_bytes + prepared.moments_bytes + prepared.search_bytes
    free = Device.detect(prepared.options.device).free_memory_bytes()
    if needed > free:
        raise MemoryRefused(
            f"compress: {decimal(prepared.activation_bytes)} for the calibration text, "
            f"{decimal(prepared.moments_bytes)} for a group of experts and its moments and "
            f"{decimal(prepared.search_bytes)} for the matrices that are searched together, "
            f"{decimal(free)} of memory are free",
            hint="lower rows, cols or group_bytes, or leave the largest matrices as they are",
        )


@dataclass(slots=True)
class _Run:
    """The units that are still to be written."""

    prepared: Prepared
    output: Output
    search: Search
    listener: Listener
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        total = sum(item.num_weights for item in self.prepared.plan.items)
        self.progress = Progress("", 0, total)

    def units(self) -> None:
        prepared = self.prepared
        device = torch.device(prepared.options.device)
        source = Source(prepared.checkpoint, prepared.config)
        encoder = Encoder(source, self.search, device, prepared.options.group_bytes)
        groups = prepared.plan.groups()
        left = [name for name in groups if name not in self.output.done]
        walk = None
        if prepared.calibration and any(name.startswith(REACHED) for name in left):
            shrink = prepared.plan.recipe.shrink_tokens
            walk = Walk(encoder, prepared.calibration.token_ids, shrink)
            self._restore(walk, [name for name in groups if name.startswith(LAYER)])
        for name, items in groups.items():
            self.progress.unit = name
            if name in self.output.done:
                self._advance(items)
            else:
                self._unit(name, items, encoder, walk)

    def _restore(self, walk: Walk, layers: Sequence[str]) -> None:
        """To where the text was after the last layer that is done."""
        done = [name for name in layers if name in self.output.done]
        if not done:
            walk.begin()
            return
        first_missing = next((name for name in layers if name not in done), None)
        path = self.output.state(done[-1]) if done == list(layers[: len(done)]) else None
        if path is None:
            what = f"the calibration text after {done[-1]}"
            if done != list(layers[: len(done)]):
                what = f"{first_missing}, from which later layers were made,"
            raise CheckpointError(
                f"{self.output.folder}: {what} is lost or damaged, and with it the way to go on",
                hint="remove the folder and start again",
            )
        walk.restore(path)

    def _unit(self, name: str, items: Sequence[Item], encoder: Encoder, walk: Walk | None) -> None:
        reports: dict[str, object] = {}
        with self.output.unit(name) as unit:
            for encoded in _encoded(name, items, encoder, walk):
                for spec, tensor in encoded.tensors:
                    unit.add(spec.name, spec.dtype, spec.shape, _bytes(tensor))
                if encoded.report is not None:
                    reports[encoded.item.name] = asdict(encoded.report)
                self._advance([encoded.item])
            unit.note = {"reports": reports}
            if walk is not None and name.startswith(LAYER):
                unit.save_state([walk.state()])
        log.info("%s is written", name)

    def _advance(self, items: Sequence[Item]) -> None:
        self.progress.done_weights += sum(item.num_weights for item in items)
        self.listener(self.progress)


def _encoded(
    name: str, items: Sequence[Item], encoder: Encoder, walk: Walk | None
) -> Iterator[Encoded]:
    """The items of a unit; with a walk, those that the text reaches move it on."""
    if walk is not None and name.startswith(LAYER):
        return walk.layer(int(name.removeprefix(LAYER)), items)
    if walk is not None and name == "head":
        return walk.head(items)
    if walk is not None and name == "mtp":
        return walk.mtp(items)
    return encoder(items, unknown)


def _bytes(tensor: Tensor) -> Buffer:
    data: Buffer = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def _identity(checkpoint: Checkpoint) -> str:
    """Names, places and sizes of all tensors, sizes and times of their files."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape} {info.start}\n".encode())
    for path in sorted({info.file for info in checkpoint.tensors.values()}):
        found = path.stat()
        digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()
