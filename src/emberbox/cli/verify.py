"""`emberbox verify DIR`: reads a folder of weights and says what in it is not as it should be."""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from emberbox.cli.flags import checkpoint_folder

if TYPE_CHECKING:
    from emberbox.store.verification import Verdict

NAME = "verify"
SUMMARY = "prove that a folder of weights is whole, or name what in it is damaged"
EXAMPLE = """example:
  emberbox verify models/ember-nano-base2

Every file is compared with SHA256SUMS and every tensor with tensors.sha256.json, where the folder
has them; headers, sizes and index are checked always. What could not be compared is said."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument("folder", type=checkpoint_folder, metavar="DIR", help="checkpoint folder")


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 when something is damaged, missing or there without a word."""
    console = Console(highlight=False, quiet=args.json, soft_wrap=True)
    verdict = _read(args.folder, console)
    if args.json:
        print(json.dumps({"is_good": not verdict.faults, **asdict(verdict)}))
    else:
        for line in _lines(args.folder, verdict):
            console.print(line, markup=False)
    return 1 if verdict.faults else 0


def _read(folder: Path, console: Console) -> "Verdict":
    from emberbox.store.verification import num_bytes_of, verify_folder

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    is_quiet = not console.is_terminal or console.quiet
    text = TextColumn("{task.description}")
    with Progress(text, *columns, console=console, transient=True, disable=is_quiet) as bar:
        task = bar.add_task("comparing", total=num_bytes_of(folder))
        return verify_folder(folder, lambda count: bar.advance(task, count))


def _lines(folder: Path, verdict: "Verdict") -> list[str]:
    """The verdict for people: the first line says it, the others name each fault."""
    compared = (
        f"{verdict.num_files:,} files and {verdict.num_tensors:,} tensors compared, "
        "headers, sizes and index checked"
    )
    word = "good" if not verdict.faults else f"{len(verdict.faults)} fault(s)"
    return [
        f"{folder}: {word}; {compared}",
        *_fault_lines(verdict),
        *(f"not compared: {what}" for what in verdict.unknown),
    ]


def _fault_lines(verdict: "Verdict") -> Iterator[str]:
    """One for each fault; of files with one and the same fault the first few."""
    from emberbox.store.verification import MAX_NAMES

    count = Counter(fault.what for fault in verdict.faults)
    shown: Counter[str] = Counter()
    for fault in verdict.faults:
        shown[fault.what] += 1
        if shown[fault.what] <= MAX_NAMES:
            yield f"  - {f'{fault.file}: ' if fault.file else ''}{fault.what}"
        elif shown[fault.what] == count[fault.what]:
            yield f"  - and {count[fault.what] - MAX_NAMES:,} more: {fault.what}"
