"""`emberbox compress SRC DST`: EXL3, NVFP4 or block FP8 by a recipe, resumable, checked first."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from emberbox.cli.flags import checkpoint_folder, settings_from
from emberbox.errors import SettingsError
from emberbox.settings import LOG_LEVELS, LogSettings

if TYPE_CHECKING:
    from emberbox.compress.disk import Room
    from emberbox.compress.pipeline import CompressOptions, Prepared
    from emberbox.compress.pipeline import Progress as Written
    from emberbox.compress.recipe import Budget
    from emberbox.compress.trellis_steps import Search

NAME = "compress"
SUMMARY = "make a smaller checkpoint by a recipe: EXL3, NVFP4, block FP8, fewer experts"
EXAMPLE = """example:
  emberbox compress models/ember-nano /tmp/nano-nvfp4 --recipe nvfp4
  emberbox compress models/ember-nano /tmp/nano-base2 --recipe base2 --plan
  emberbox compress models/ember-nano /tmp/nano-base2 --recipe base2

recipes: base2, base2.5, base3, base4, base2-published, measured, nvfp4, fp8-block, or a TOML file.
--plan says what would be written, how much memory and disk it takes, and whether it could begin in
DST now; of a FILE of --sensitivity that is missing it writes that.
Ended at any time, the same command with --resume goes on after the last complete layer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument("source", type=checkpoint_folder, metavar="SRC", help="checkpoint folder")
    parser.add_argument("folder", type=checkpoint_folder, metavar="DST", help="new folder")
    parser.add_argument(
        "--recipe", required=True, metavar="NAME_OR_FILE", help="what becomes what; see below"
    )
    parser.add_argument(
        "--budget-bytes", type=int, metavar="BYTES", help="of all tensors, in place of bits"
    )
    parser.add_argument(
        "--sensitivity",
        type=Path,
        metavar="FILE",
        help="spend the budget as measured there; a file that is not there is measured first",
    )
    parser.add_argument("--plan", action="store_true", help="say what would be done, and stop")
    parser.add_argument("--resume", action="store_true", help="go on where DST was left")
    parser.add_argument(
        "--text", type=Path, metavar="PATH", help="calibration text (default: the shipped one)"
    )
    parser.add_argument("--rows", type=int, default=128, help="of the text, at most (128)")
    parser.add_argument("--cols", type=int, default=512, help="tokens of a row (512)")
    parser.add_argument("--seed", type=int, default=0, help="which rows are taken (0)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--group-bytes",
        type=int,
        default=4 << 30,
        metavar="BYTES",
        help="of memory for matrices that are searched together (4 GiB)",
    )
    parser.add_argument(
        "--max-shard-bytes", type=int, default=8 << 30, metavar="BYTES", help="of a file (8 GiB)"
    )
    parser.add_argument("--log-level", dest="level", choices=LOG_LEVELS, help="default: info")


def run(args: argparse.Namespace) -> int:
    """Plan, show, write; exit code 0 when DST is complete."""
    from emberbox import logs
    from emberbox.compress.disk import look
    from emberbox.compress.pipeline import compress, prepare
    from emberbox.compress.recipe import load_recipe

    logs.set_up(settings_from(LogSettings, args).level)
    options = _options(args)
    budget = _budget(args, options)
    prepared = prepare(args.source, load_recipe(args.recipe, budget), options)
    console = Console(highlight=False, quiet=args.json, soft_wrap=True)
    console.print(_table(prepared))
    for note in prepared.plan.notes:
        console.print(f"note: {note}", markup=False)
    room = look(args.folder, prepared.checkpoint.folder, prepared.job, resume=args.resume)
    console.print(
        f"disk: {decimal(room.needed)} needed, {decimal(room.free)} free in {room.place}",
        markup=False,
    )
    if not args.plan:
        with _Bar(console) as bar:
            search = _search(options, is_needed=prepared.calibration is not None)
            compress(prepared, args.folder, search, bar.written, bar.verified)
        console.print(f"{args.folder} is complete: emberbox serve {args.folder}", markup=False)
    if args.json:
        written = None if args.plan else args.folder
        print(json.dumps(_as_json(prepared, room) | {"folder": written and str(written)}))
    return 0


def _options(args: argparse.Namespace) -> "CompressOptions":
    from emberbox.compress.pipeline import CompressOptions
    from emberbox.device import Device

    return CompressOptions(
        text=args.text,
        rows=args.rows,
        cols=args.cols,
        seed=args.seed,
        max_shard_bytes=args.max_shard_bytes,
        device=Device.detect(args.device).torch_name,
        group_bytes=args.group_bytes,
        resume=args.resume,
    )


def _budget(args: argparse.Namespace, options: "CompressOptions") -> "Budget | None":
    """What the flags say; losses that are not measured yet are measured now."""
    from emberbox.compress.measure_sensitivity import sensitivity_of
    from emberbox.compress.recipe import Budget, load_recipe
    from emberbox.store.durable import disk_problems, write_file

    if args.budget_bytes is None:
        if args.sensitivity is not None:
            raise SettingsError("--sensitivity: without --budget-bytes it says nothing")
        return None
    if args.sensitivity is not None and not args.sensitivity.exists():
        recipe = load_recipe(args.recipe, Budget(args.budget_bytes))
        print(f"{args.sensitivity} is not there: measuring it", file=sys.stderr, flush=True)
        found = sensitivity_of(args.source, recipe, options, _search(options))
        draft = args.sensitivity.with_name(f"{args.sensitivity.name}.part")
        with disk_problems(draft.parent):
            write_file(draft, [found.text.encode()])
            draft.replace(args.sensitivity)
    return Budget(args.budget_bytes, args.sensitivity)


def _search(options: "CompressOptions", *, is_needed: bool = True) -> "Search":
    """The trellis search for the device; what it needs is looked for now, not in the middle."""
    if options.device != "cpu":
        from emberbox.compress import trellis_search_cuda

        trellis_search_cuda.check(options.device)
        return trellis_search_cuda.search
    from emberbox.compress import trellis_search_cpu

    if is_needed:
        trellis_search_cpu.kernel()
    return trellis_search_cpu.search


def _table(prepared: "Prepared") -> Table:
    """Formats, sizes and what the conversion needs, for people."""
    plan = prepared.plan
    table = Table(title=f"recipe {escape(plan.recipe.name)}", title_justify="left")
    table.add_column("stored as")
    table.add_column("weights", justify="right")
    table.add_column("size", justify="right")
    for stored, (num_weights, num_bytes) in _by_format(prepared).items():
        table.add_row(stored, f"{num_weights:,}", decimal(num_bytes))
    table.add_row("all", f"{sum(i.num_weights for i in plan.items):,}", decimal(plan.num_bytes))
    for name, num_bytes in _needs(prepared).items():
        table.add_row(name, "", decimal(num_bytes), style="dim")
    return table


def _by_format(prepared: "Prepared") -> dict[str, tuple[int, int]]:
    sizes: dict[str, tuple[int, int]] = {}
    for item in prepared.plan.items:
        stored = str(item.stored) if item.is_linear else "as in the source"
        num_weights, num_bytes = sizes.get(stored, (0, 0))
        sizes[stored] = num_weights + item.num_weights, num_bytes + item.num_bytes
    return dict(sorted(sizes.items()))


def _needs(prepared: "Prepared") -> dict[str, int]:
    """Beside the result: disk and memory in bytes."""
    if prepared.calibration is None:
        return {}
    return {
        "disk for the calibration text": 2 * prepared.state_bytes,
        "memory for the calibration text": prepared.activation_bytes,
        "memory for a group of experts and its moments": prepared.moments_bytes,
        "memory for a group of matrices": prepared.search_bytes,
    }


def _as_json(prepared: "Prepared", room: "Room") -> dict[str, object]:
    plan, found = prepared.plan, prepared.calibration
    return {
        "recipe": plan.recipe.name,
        "num_bytes": plan.num_bytes,
        "num_tensors": plan.num_tensors,
        "average_bits": plan.average_bits,
        "notes": list(plan.notes),
        "calibration": found and {"source": found.source, "rows": len(found.token_ids)},
        "needs": _needs(prepared),
        "disk": {"needed_bytes": room.needed, "free_bytes": room.free, "place": str(room.place)},
    }


class _Bar:
    """Weights done and time left, on a terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )
        self._task: TaskID = self._progress.add_task("opening", total=None)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def verified(self, done: int, total: int) -> None:
        """`done` of `total` bytes of an earlier beginning are compared."""
        self._progress.update(self._task, description="comparing", completed=done, total=total)

    def written(self, progress: "Written") -> None:
        """Another weight is encoded."""
        self._progress.update(
            self._task,
            description=progress.unit,
            completed=progress.done_weights,
            total=progress.total_weights,
        )
