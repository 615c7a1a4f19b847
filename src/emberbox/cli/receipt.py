"""`emberbox receipt show|verify|compare FILE...`: reads what a measurement wrote.

A receipt is of fidelity or of speed; its schema says which. Two of speed are not compared.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from emberbox.errors import MeasureError, SettingsError

if TYPE_CHECKING:
    from emberbox.measure.panel import Panel
    from emberbox.measure.receipt import Receipt

NAME = "receipt"
SUMMARY = "show a receipt, compute it again from what was recorded, or compare two"
EXAMPLE = """example:
  emberbox receipt show base2.json
  emberbox receipt verify *.json
  emberbox receipt compare plain.json ours.json

verify computes every figure again, from the record beside a receipt of fidelity or from the times
in a receipt of speed, and fails when one differs.
compare pairs the windows of two receipts of fidelity: the second against the first, below 0 it is
closer."""

ACTIONS = ("show", "verify", "compare")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=" | ".join(ACTIONS))
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="NAME.json")
    parser.add_argument(
        "--panel", metavar="NAME_OR_FILE", help="of verify: the panel, if it is none of the shipped"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 when a receipt is not good."""
    if args.panel is not None and args.action != "verify":
        raise SettingsError("--panel: only `receipt verify` takes it")
    if args.action == "show":
        return _show(args.files, as_json=args.json)
    if args.action == "verify":
        return _verify(args.files, args.panel, as_json=args.json)
    return _compare(args.files, as_json=args.json)


def _show(files: list[Path], *, as_json: bool) -> int:
    from emberbox.measure.receipt import load, seal_of
    from emberbox.measure.show import show
    from emberbox.measure.speed_receipt import is_speed, load_speed, show_speed

    documents: list[dict[str, Any]] = []
    for file in files:
        receipt = None if is_speed(file) else load(file)
        document = load_speed(file) if receipt is None else receipt.document
        documents.append(document)
        if document["sha256"] != seal_of(document):
            said = f"{file}: edited since it was sealed; its figures may be anybody's"
            _console(stderr=as_json).print(Text(said, "bold red"), soft_wrap=True)
        if not as_json:
            _console().print(Text(show_speed(document)) if receipt is None else show(receipt))
    if as_json:
        print(json.dumps(documents))
    return 0


def _verify(files: list[Path], panel_name: str | None, *, as_json: bool) -> int:
    from emberbox.measure.panel import load_panel

    panel = None if panel_name is None else load_panel(panel_name)
    found = {file: _problems(file, panel) for file in files}
    if as_json:
        print(json.dumps({str(file): problems for file, problems in found.items()}))
    else:
        for file, problems in found.items():
            lines = "\n  - ".join(_verdict(file, problems, panel))
            _console().print(lines, markup=False, soft_wrap=True)
    return 1 if any(found.values()) else 0


def _problems(file: Path, panel: "Panel | None") -> list[str]:
    from emberbox.measure.speed_receipt import is_speed, verify_speed
    from emberbox.measure.verify import verify

    return verify_speed(file) if is_speed(file) else verify(file, panel)


def _verdict(file: Path, problems: list[str], panel: "Panel | None") -> list[str]:
    """The first line and what follows it."""
    from emberbox.measure.receipt import load
    from emberbox.measure.speed_receipt import is_speed, load_speed
    from emberbox.measure.verify import is_shipped

    if problems:
        return [f"{file}: {len(problems)} problem(s)", *problems]
    if is_speed(file):
        raw = load_speed(file)["raw"]
        steps = sum(len(run["step_ms"]) for run in raw)
        return [f"{file}: good; {len(raw)} runs, {steps:,} steps, every figure computed again"]
    receipt = load(file)
    results, name = receipt["results"], receipt["panel"]["name"]
    lines = [
        f"{file}: good; {len(results['windows'])} windows, {results['positions']:,} positions, "
        "every figure computed again"
    ]
    if panel is None and not is_shipped(receipt):
        lines.append(f"panel {name!r} does not ship with emberbox: give it with --panel")
    return lines


def _compare(files: list[Path], *, as_json: bool) -> int:
    from emberbox.measure.compare import compare
    from emberbox.measure.show import show_comparison

    if len(files) != 2:
        raise SettingsError(f"receipt compare: {len(files)} file(s), expected 2: base and new")
    base, new = (_good(file) for file in files)
    found = compare(base, new)
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        _console().print(show_comparison(found))
    return 0


def _good(file: Path) -> "Receipt":
    """The receipt, verified: figures of a crooked one are compared with nothing."""
    from emberbox.measure.receipt import load
    from emberbox.measure.speed_receipt import is_speed
    from emberbox.measure.verify import verify

    if is_speed(file):
        raise MeasureError(f"{file}: a receipt of speed; compare takes two of fidelity")
    problems = verify(file)
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise MeasureError(f"{file}: {len(problems)} problem(s):{lines}")
    return load(file)


def _console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False)
