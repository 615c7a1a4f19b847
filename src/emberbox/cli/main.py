"""`emberbox VERB ...`: finds the verb, runs it, turns failures into text and an exit code.

Exit code 0: done. 1: failed. 2: bad usage. 130: interrupted. Importing it imports no machinery.
"""

import argparse
import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from emberbox import __version__
from emberbox.cli import chat, compress, demo, doctor, measure, receipt, serve, tune, verify
from emberbox.errors import EmberboxError, SettingsError

VERBS = (serve, chat, compress, tune, measure, receipt, verify, demo, doctor)
# What writing to a closed pipe or a full device fails with.
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC)
_INTERRUPTED = 128 + signal.SIGINT  # as shells have it


def run() -> None:
    """The console script."""
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        code = _run_verb(argv)
        print(end="", flush=True)  # so that output that cannot be written fails here
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        _drop_output()
        print(f"error: standard output: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _run_verb(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    if args.run is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = args.run(args)
    except EmberboxError as error:
        _report(error, as_json=args.json)
        return 2 if isinstance(error, SettingsError) else 1
    return code


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="emberbox",
        description="Run GLM-5.3-Flash on one small box, and prove how well.",
        epilog="exit code: 0 done, 1 failed, 2 bad usage, 130 interrupted. "
        "`emberbox VERB --help` has an example.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"emberbox {__version__}")
    parser.set_defaults(run=None)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for verb in VERBS:
        sub = verbs.add_parser(
            verb.NAME,
            help=verb.SUMMARY,
            description=verb.SUMMARY,
            epilog=verb.EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        verb.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print JSON for machines")
        sub.set_defaults(run=verb.run)
    return parser


def _drop_output() -> None:
    """Sends what is still buffered nowhere; the interpreter would fail on it once more."""
    with contextlib.suppress(OSError):  # standard output may be no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _report(error: EmberboxError, *, as_json: bool) -> None:
    if as_json:
        shown = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
        print(json.dumps({"error": shown}))
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("error:", style="bold red", end=" ")
    console.print(error.message, markup=False)
    if error.hint:
        console.print(f"hint: {error.hint}", markup=False)
