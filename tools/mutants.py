"""Make known mistakes in a copy of the source, one at a time, and see that the tests notice.

The mistakes stand in mutants.toml. Prints a table of who caught what; exits 1 if a mistake
survives, if its fragment is no longer in the source, or if its tests fail without it.

    python tools/mutants.py --fast --only "sinkhorn|router"
    python tools/mutants.py --write docs/mutants.md
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
COPIED = ("src", "tests", "pyproject.toml")
LINKED = ("models",)
TIMEOUT_S = 300
HEADER = """# Mistakes and the tests that catch them

Made by `make mutants`: each line is one edit of the source (`tools/mutants.toml`), applied alone
to a copy, with a test that then fails. Numbers are sections and items of
[architecture](architecture.md). To see one of them caught:

```console
$ python tools/mutants.py --fast --only "post without"
```

| mistake | where | in | caught by |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Mutant:
    """One edit: `find` becomes `put` in `file`, a path under src/emberbox. `tests`: node ids."""

    mistake: str
    point: str
    file: str
    find: str
    put: str
    tests: tuple[str, ...]

    def apply(self, tree: Path) -> bool:
        """Edit the copy. False, and no edit, unless `find` occurs exactly once."""
        path = tree / "src" / "emberbox" / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.find) != 1:
            return False
        path.write_text(text.replace(self.find, self.put), encoding="utf-8")
        return True


@dataclass(frozen=True)
class Outcome:
    """Node ids that failed in their own call, and everything else that went wrong."""

    caught_by: tuple[str, ...] = ()
    trouble: str = ""


class Recorder:
    """A pytest plugin: failures of tests, and errors outside them."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.errors: list[str] = []

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.failed:
            (self.failed if report.when == "call" else self.errors).append(report.nodeid)

    def pytest_collectreport(self, report: object) -> None:
        if report.failed:
            self.errors.append(report.nodeid)


def read_table(path: Path) -> list[Mutant]:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    tests: Mapping[str, str] = table["tests"]
    return [
        Mutant(**{**entry, "tests": tuple(tests[key] for key in entry["tests"])})
        for entry in table["mutant"]
    ]


def copy_tree(target: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy2(source, target / name)
    for name in LINKED:
        (target / name).symlink_to(ROOT / name)


def run_pytest(tree: Path, tests: Iterable[str], *, fast: bool) -> int:
    """In a forked child: run the tests of `tree` and leave what happened in its result.json."""
    os.chdir(tree)
    log = os.open(tree / "log.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(tree / "src"), str(tree)]
    import pytest

    recorder = Recorder()
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tree), *(["-x"] if fast else [])]
    # Of plugins whose package the parent has imported already.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = int(pytest.main([*options, *tests], plugins=[recorder]))
    result = {"code": code, "failed": recorder.failed, "errors": recorder.errors}
    (tree / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


class Job:
    """One run of tests in a forked child, on a copy of the tree of its own."""

    def __init__(self, mutant: Mutant | None, tests: Sequence[str], *, fast: bool) -> None:
        self.mutant = mutant
        self.keeper = tempfile.TemporaryDirectory(prefix="mutant-")
        self.folder = Path(self.keeper.name)
        copy_tree(self.folder)
        self.started = time.monotonic()
        self.found = mutant is None or mutant.apply(self.folder)
        self.pid = 0
        if self.found:
            self.pid = os.fork()
        if self.found and self.pid == 0:
            try:
                run_pytest(self.folder, tests, fast=fast)
            except BaseException:
                traceback.print_exc()
            finally:  # nothing of the parent's may run in the child
                sys.stderr.flush()
                os._exit(0)

    def poll(self) -> Outcome | None:
        """The outcome, once there is one."""
        if not self.found:
            return self.close(Outcome(trouble="its fragment is not in the source exactly once"))
        if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() - self.started < TIMEOUT_S:
                return None
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
            return self.close(Outcome(trouble=f"not finished after {TIMEOUT_S} s"))
        return self.close(self.read())

    def read(self) -> Outcome:
        path = self.folder / "result.json"
        if not path.is_file():
            return Outcome(trouble="the tests did not run to their end")
        result = json.loads(path.read_text(encoding="utf-8"))
        failed = tuple(dict.fromkeys(node.partition("[")[0] for node in result["failed"]))
        if failed:
            return Outcome(caught_by=failed)
        if result["errors"] or result["code"] not in (0, 1):
            named = ", ".join(result["errors"]) or f"pytest returned {result['code']}"
            return Outcome(trouble=f"errors outside the tests: {named}")
        return Outcome()

    def close(self, outcome: Outcome) -> Outcome:
        if outcome.trouble and self.found:
            log = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
            print("\n".join(log.splitlines()[-30:]), file=sys.stderr)
        self.keeper.cleanup()
        return outcome


def run_all(
    mutants: Sequence[Mutant], *, jobs: int, fast: bool
) -> Iterator[tuple[Mutant, Outcome]]:
    """Every mutant with its outcome, in the order in which they finish."""
    waiting, running = list(reversed(mutants)), []
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running.append(Job(mutant, mutant.tests, fast=fast))
        for job in list(running):
            outcome = job.poll()
            if outcome is not None:
                running.remove(job)
                yield job.mutant, outcome
        time.sleep(0.05)


def unmutated(mutants: Sequence[Mutant]) -> Outcome:
    """The tests on an unchanged copy: what fails there proves nothing."""
    job = Job(None, sorted({test for mutant in mutants for test in mutant.tests}), fast=False)
    while (outcome := job.poll()) is None:
        time.sleep(0.05)
    return outcome


def row(mutant: Mutant, outcome: Outcome) -> str:
    tests = [f"`{'::'.join(Path(node).name.split('::'))}`" for node in outcome.caught_by]
    return f"| {mutant.mistake} | {mutant.point} | `{mutant.file}` | {', '.join(tests)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="mistakes that match this pattern")
    parser.add_argument("--fast", action="store_true", help="stop at the first test that fails")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", type=Path, help="write the table to this file")
    args = parser.parse_args()
    mutants = [m for m in read_table(TABLE) if re.search(args.only, m.mistake, re.IGNORECASE)]
    if not mutants:
        parser.error(f"no mistake matches {args.only!r}")
    if args.write and args.only:
        parser.error("--write needs all mistakes; leave --only out")
    os.environ["OMP_NUM_THREADS"] = "1"
    # Imported here so that every child starts with them; emberbox itself each child imports anew.
    import torch
    import transformers.models.glm5_next.modeling_glm5_next  # noqa: F401

    torch.set_num_threads(1)
    clean = unmutated(mutants)
    if clean != Outcome():
        print(f"without any mistake: {clean.caught_by or clean.trouble}", file=sys.stderr)
        return 1
    outcomes: dict[Mutant, Outcome] = {}
    for mutant, outcome in run_all(mutants, jobs=args.jobs, fast=args.fast):
        outcomes[mutant] = outcome
        state = outcome.trouble or ("caught" if outcome.caught_by else "SURVIVES")
        print(f"{len(outcomes)}/{len(mutants)} {mutant.mistake}: {state}", flush=True)
    bad = [mutant for mutant, outcome in outcomes.items() if not outcome.caught_by]
    table = HEADER + "\n".join(row(m, outcomes[m]) for m in mutants) + "\n"
    if args.write and not bad:
        args.write.write_text(table, encoding="utf-8")
    else:
        print(table)
    for mutant in bad:
        print(f"not caught: {mutant.mistake} ({outcomes[mutant].trouble or 'survives'})")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
