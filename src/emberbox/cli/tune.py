"""`emberbox tune REFERENCE CANDIDATE DST`: distil scales and norms of a compressed model."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from emberbox.cli.flags import checkpoint_folder, settings_from
from emberbox.cli.serve import StopSignals
from emberbox.cli.stage_bar import StageBar
from emberbox.settings import LOG_LEVELS, LogSettings

if TYPE_CHECKING:
    from emberbox.compress.tune import Progress as Tuned
    from emberbox.compress.tune import TuneOptions, Tuning
    from emberbox.compress.tune_report import Outcome

NAME = "tune"
SUMMARY = "bring a compressed checkpoint closer to its source at the same bytes"
EXAMPLE = """example:
  emberbox tune models/ember-nano models/ember-nano-base2 /tmp/nano-base2-tuned
  emberbox tune models/ember-nano models/ember-nano-base2 /tmp/nano-base2-tuned \\
    --steps 30 --step-rows 2 --cols 128

EXL3 scales and norms of the trunk learn to give the source's predictions on text; trellis, all
other tensors and every size stay. The best step on held-out rows is written. Both models are
decoded to float32, one after the other, so the whole network has to fit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument("reference", type=checkpoint_folder, metavar="REFERENCE", help="the source")
    parser.add_argument(
        "candidate", type=checkpoint_folder, metavar="CANDIDATE", help="EXL3, made of it"
    )
    parser.add_argument("folder", type=checkpoint_folder, metavar="DST", help="new folder")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="PATH",
        help="as of compress, or token_ids in an .npz file (default: the shipped text)",
    )
    parser.add_argument("--rows", type=int, default=256, help="of the text, at most (256)")
    parser.add_argument("--cols", type=int, default=256, help="tokens of a row (256)")
    parser.add_argument("--seed", type=int, default=1, help="which rows, in which order (1)")
    parser.add_argument("--steps", type=int, default=250, help="of the optimiser (250)")
    parser.add_argument("--step-rows", type=int, default=8, metavar="N", help="rows of a step (8)")
    parser.add_argument(
        "--lr", type=float, help="the largest step size (0.003 at 8,192 tokens a step, less below)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--log-level", dest="level", choices=LOG_LEVELS, help="default: info")


def run(args: argparse.Namespace) -> int:
    """Check, learn, write; exit code 0 when DST is complete, 1 when a signal came before."""
    try:
        with StopSignals() as stop:
            return _run(args, stop)
    except KeyboardInterrupt:
        said = f"{args.folder} is there" if args.folder.exists() else "nothing is written"
        print(f"interrupted; {said}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, stop: StopSignals) -> int:
    from emberbox import logs
    from emberbox.compress.tune import prepare_tuning, tune

    logs.set_up(settings_from(LogSettings, args).level)
    prepared = prepare_tuning(args.reference, args.candidate, args.folder, _options(args))
    console = Console(highlight=False, quiet=args.json, soft_wrap=True)
    stop.check()
    with _Bar(console) as bar:
        outcome = tune(prepared, bar.moved)
    if args.json:
        print(json.dumps(_as_json(prepared, outcome)))
        return 0
    console.print(
        f"held-out KL {outcome.first:.5f} -> {outcome.best:.5f} nats a token "
        f"(step {outcome.best_step} of {prepared.options.steps}; after the last {outcome.last:.5f})"
    )
    console.print(f"{args.folder} is complete: emberbox serve {args.folder}", markup=False)
    return 0


def _options(args: argparse.Namespace) -> "TuneOptions":
    from emberbox.compress.tune import TuneOptions
    from emberbox.device import Device

    return TuneOptions(
        text=args.text,
        rows=args.rows,
        cols=args.cols,
        seed=args.seed,
        steps=args.steps,
        step_rows=args.step_rows,
        lr=args.lr,
        device=Device.detect(args.device).torch_name,
    )


def _as_json(prepared: "Tuning", outcome: "Outcome") -> dict[str, object]:
    return {
        "folder": str(prepared.folder),
        "num_bytes": prepared.candidate.checkpoint.num_bytes,
        "tuned": {
            "scales": outcome.num_scales,
            "norms": len(outcome.entries) - outcome.num_scales,
        },
        "held_out_kl": {
            "first": outcome.first,
            "last": outcome.last,
            "written": outcome.best,
            "written_step": outcome.best_step,
        },
        "refused_steps": outcome.num_refused,
    }


class _Bar(StageBar):
    """How far the tuning is, with the newest held-out KL."""

    def moved(self, progress: "Tuned") -> None:
        """A stage begins, or goes on."""
        said = "" if progress.kl is None else f"{progress.stage}, KL {progress.kl:.4f}"
        self.show(progress.stage, progress.done, progress.total, said)
