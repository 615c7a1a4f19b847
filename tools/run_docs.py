"""Execute the commands that the documentation shows, so that none of them can go stale.

Fenced blocks of language `console` (lines that begin with `$ `) and `python` are executed in the
repository's root with the virtual environment first on PATH: all of them on the pages under docs/,
in the README those that follow a line `<!-- run -->`. One block is one shell, so a server started
with `&` serves the later lines; what still runs at the end is stopped. A command that fails, or a
docs page without a command, fails the run. Output shown in a block is for the reader: not compared.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK_TIMEOUT_SECONDS = 180
GRACE_SECONDS = 5.0
FENCE = re.compile(
    r"^(?P<mark><!-- run -->\n)?^```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One executable block: where it stands, and the program text."""

    page: str
    line: int
    language: str
    program: str


def console_commands(body: str) -> str:
    """The shell program of a console block: its `$ ` lines, each up to where it is complete."""
    commands: list[str] = []
    is_open = False
    for line in body.splitlines():
        if is_open:
            commands[-1] += f"\n{line}"
        elif line.startswith("$ "):
            commands.append(line[2:])
        is_open = bool(commands) and _goes_on(commands[-1])
    return "\n".join(commands)


def _goes_on(command: str) -> bool:
    """True when the next line belongs to it: a backslash at the end, or an open quotation."""
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command)
    except ValueError:
        return True
    return False


def blocks(text: str, page: str, *, only_marked: bool) -> Iterator[Block]:
    """The executable blocks of a page, in order."""
    for match in FENCE.finditer(text):
        language, body = match["language"], match["body"]
        if language not in ("console", "python") or (only_marked and not match["mark"]):
            continue
        program = console_commands(body) if language == "console" else body
        if program.strip():
            yield Block(page, text.count("\n", 0, match.start()) + 1, language, program)


def pages(root: Path) -> dict[str, list[Block]]:
    """The executable blocks of the README and of every page under docs/, by page."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    found = {"README.md": list(blocks(readme, "README.md", only_marked=True))}
    for path in sorted((root / "docs").rglob("*.md")):
        name = path.relative_to(root).as_posix()
        found[name] = list(blocks(path.read_text(encoding="utf-8"), name, only_marked=False))
    return found


def execute(block: Block, root: Path) -> tuple[int, str]:
    """Run one block to its end; (exit status, output). Nothing it started outlives it."""
    python, shell = [sys.executable, "-c"], ["bash", "-euo", "pipefail", "-c"]
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    # More threads only wait for each other on a model this small, most of all on a busy machine.
    environment.setdefault("OMP_NUM_THREADS", "1")
    # The output goes through a file: a server left in the background would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*(python if block.language == "python" else shell), block.program],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=BLOCK_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            _stop_group(process.pid)
        process.wait()
        output.seek(0)
        return status, output.read().decode("utf-8", "replace")


def _stop_group(leader: int) -> None:
    """Ask what is left of a block's processes to end, then end them."""
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        os.killpg(leader, signal.SIGTERM)
        while time.monotonic() < deadline:
            time.sleep(0.05)
            os.killpg(leader, 0)
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="pages to run, such as docs/index.md; default all")
    args = parser.parse_args()
    chosen = {
        name: found for name, found in pages(ROOT).items() if not args.only or name in args.only
    }
    failures = [f"{name}: shows no command" for name, found in chosen.items() if not found]
    for block in (block for found in chosen.values() for block in found):
        start = time.monotonic()
        status, output = execute(block, ROOT)
        place = f"{block.page}:{block.line}"
        print(
            f"{'ok' if status == 0 else 'FAILED':6} {time.monotonic() - start:5.1f} s  {place}",
            flush=True,
        )
        if status != 0:
            failures.append(f"{place}: exit status {status}")
            print(f"{block.program}\n--- output\n{output}", flush=True)
    for failure in failures:
        print(f"docs: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
