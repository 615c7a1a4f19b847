"""`emberbox measure KIND`: how close a model is (fidelity) or how fast (speed), with a receipt."""

import argparse
import hashlib
import json
import shlex
from typing import TYPE_CHECKING

from rich.console import Console

from emberbox.cli import measure_speed
from emberbox.cli.flags import checkpoint_folder, settings_from
from emberbox.cli.measure_speed import kept
from emberbox.cli.stage_bar import StageBar
from emberbox.settings import LOG_LEVELS, LogSettings

if TYPE_CHECKING:
    from pathlib import Path

    from emberbox.measure.fidelity import Fidelity, FidelityOptions
    from emberbox.measure.fidelity import Progress as Measured
    from emberbox.measure.panel import Panel
    from emberbox.measure.receipt import Measured as Facts
    from emberbox.measure.receipt import Receipt
    from emberbox.measure.record import Windows

NAME = "measure"
SUMMARY = "measure a model and write a receipt: fidelity, speed"
FIDELITY = "how far a model's predictions are from another's, token by token, on a fixed panel"
EXAMPLE = """example:
  emberbox measure fidelity models/ember-nano models/ember-nano-base2 --panel nano-25 \\
    -o base2.json
  emberbox receipt show base2.json
  emberbox measure speed models/ember-nano --engine -o speed.json

`emberbox measure KIND --help` lists the flags."""
DETAILS = """example:
  emberbox measure fidelity models/ember-nano models/ember-nano-base2 --panel nano-25 \\
    -o base2.json

lanes, whose figures are never mixed:
  weights  every weight decoded to float32, the network in plain torch: the weights' error alone
  served   the engine's own prefill with its kernels, its types and its cache: what users get
The text alone is measured: no figure here is about pictures or about drafting.
Beside OUT.json lies OUT.record.xz, from which `emberbox receipt verify` computes every figure."""

# Flags that the printed command repeats, where they are not at their defaults.
REPEATED = {"lane": "weights", "device": "auto", "runs": 2, "chunk": 512}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The kinds of measurement, each with its flags."""
    kinds = parser.add_subparsers(dest="kind", title="kinds", metavar="KIND", required=True)
    for name, summary, details, add in (
        ("fidelity", FIDELITY, DETAILS, _add_fidelity),
        (
            measure_speed.NAME,
            measure_speed.SUMMARY,
            measure_speed.DETAILS,
            measure_speed.add_arguments,
        ),
    ):
        kind = kinds.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=details,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add(kind)


def _add_fidelity(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("reference", type=checkpoint_folder, metavar="REFERENCE", help="the original")
    kind.add_argument("candidate", type=checkpoint_folder, metavar="CANDIDATE", help="to be judged")
    panel = "nano-25, nano-short or a .json(.xz) file"
    kind.add_argument("--panel", required=True, metavar="NAME_OR_FILE", help=panel)
    output = kind.add_argument("-o", "--output", type=checkpoint_folder, required=True)
    output.metavar, output.help = "OUT.json", "the receipt; its name must be free"
    kind.add_argument("--force", action="store_true", help="replace a receipt that is there")
    kind.add_argument("--lane", default="weights", help="weights or served (weights)")
    kind.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    kind.add_argument("--runs", type=int, default=2, help="cold runs of the candidate (2)")
    kind.add_argument("--chunk", type=int, default=512, help="tokens of a step, if served (512)")
    kind.add_argument(
        "--capture",
        type=checkpoint_folder,
        metavar="FOLDER",
        help="keep the reference's states here, for reuse",
    )
    kind.add_argument("--log-level", dest="level", choices=LOG_LEVELS, help="default: info")
    # The verb's own --json comes after these flags; without a default this one does not undo it.
    kind.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print the receipt as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Check, measure, write, show; exit code 0 when the receipt is written."""
    return measure_speed.run(args) if args.kind == measure_speed.NAME else _run_fidelity(args)


def _run_fidelity(args: argparse.Namespace) -> int:
    from emberbox import logs
    from emberbox.measure.documents import require_writable
    from emberbox.measure.fidelity import measure_fidelity
    from emberbox.measure.panel import load_panel
    from emberbox.measure.preflight import check_command, check_output
    from emberbox.measure.receipt import load, save
    from emberbox.measure.receipt_schema import RECORD_SUFFIX, SCHEMA
    from emberbox.measure.show import show

    logs.set_up(settings_from(LogSettings, args).level)
    options, panel, output = _options(args), load_panel(args.panel), args.output
    record = output.parent / (output.name.removesuffix(".json") + RECORD_SUFFIX)
    check_output(output, SCHEMA, beside=record, may_replace=args.force)
    require_writable(record)
    check_command(_command(args))
    console = Console(highlight=False, quiet=args.json)
    with MeasureBar(console) as bar:
        found = measure_fidelity(args.reference, args.candidate, panel, options, bar.moved)
    facts, windows = _measured(_command(args), panel, found), found.runs[0]
    code = kept(lambda: save(output, facts, windows, may_replace=args.force))
    receipt = _unsaved(output, record, facts, windows) if code else load(output)
    if args.json:
        print(json.dumps(receipt.document))
    else:
        console.print(show(receipt))
    return code


def _options(args: argparse.Namespace) -> "FidelityOptions":
    from emberbox.measure.fidelity import FidelityOptions

    return FidelityOptions(
        lane=args.lane,
        device=args.device,
        runs=args.runs,
        capture_dir=args.capture,
        chunk=args.chunk,
    )


def write_receipt(
    output: "Path", command: str, panel: "Panel", found: "Fidelity", *, may_replace: bool = False
) -> "Receipt":
    """The receipt at `output` and the record of the first run beside it; `command` measures it
    again."""
    from emberbox.measure.receipt import save

    measured = _measured(command, panel, found)
    return save(output, measured, found.runs[0], may_replace=may_replace)


def _measured(command: str, panel: "Panel", found: "Fidelity") -> "Facts":
    from emberbox.measure.receipt import Measured, run_of

    return Measured(
        panel=panel,
        lane=found.lane,
        command=command,
        reference=found.reference,
        candidate=found.candidate,
        device=found.device,
        op_table=found.op_table,
        settings=found.settings,
        runs=[run_of(windows) for windows in found.runs],
    )


def _unsaved(output: "Path", record: "Path", facts: "Facts", windows: "Windows") -> "Receipt":
    """What `save` would have written."""
    from emberbox.measure.receipt import Receipt, build_receipt
    from emberbox.measure.record import as_stored, pack_record
    from emberbox.store.checksums import FileDigest

    packed = pack_record(windows)
    digest = FileDigest(len(packed), hashlib.sha256(packed).hexdigest())
    return Receipt(output, build_receipt(facts, as_stored(windows), record.name, digest))


def _command(args: argparse.Namespace) -> str:
    """The line that measures this again; where states are kept changes no figure."""
    words = ["emberbox", NAME, "fidelity", args.reference, args.candidate]
    words += ["--panel", args.panel, "-o", args.output]
    for name, default in REPEATED.items():
        if (value := getattr(args, name)) != default:
            words += [f"--{name}", value]
    return shlex.join(map(str, words))


class MeasureBar(StageBar):
    """How far a measurement is."""

    def moved(self, progress: "Measured") -> None:
        """A stage begins, or goes on."""
        self.show(progress.stage, progress.done, progress.total)
