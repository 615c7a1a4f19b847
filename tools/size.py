"""Count lines against budgets.toml: per part of the package, per file, per function.

Every line counts, blank ones and comments too, but for a function's docstring, which is free.
Prints the table and each offender; exits 1 if there is one.
"""

import argparse
import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CUDA_SUFFIXES = {".cu", ".cuh"}


@dataclass(frozen=True)
class Report:
    """Lines per part, and one sentence for each limit that is broken."""

    parts: dict[str, tuple[int, int]] = field(default_factory=dict)  # part -> (lines, ceiling)
    offenders: list[str] = field(default_factory=list)


def count_lines(path: Path) -> int:
    """Lines of a text file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def function_lengths(source: str) -> Iterator[tuple[str, int, int]]:
    """(name, first line, lines without the docstring) of every function, nested ones included."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        first = node.body[0]
        if ast.get_docstring(node, clean=False) is not None:
            length -= (first.end_lineno or first.lineno) - first.lineno + 1
        yield node.name, node.lineno, length


def part_of(path: Path, package: Path) -> str:
    """The part a file belongs to: its top folder, or its own name at the top."""
    relative = path.relative_to(package)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def measure(package: Path, budgets: Mapping[str, Mapping[str, int]]) -> Report:
    """Hold the package's sources against the budgets."""
    report = Report()
    limits = budgets["limits"]
    lines: dict[str, Counter[str]] = {"python": Counter(), "cuda": Counter()}
    for path in sorted(package.rglob("*")):
        if path.suffix != ".py" and path.suffix not in CUDA_SUFFIXES:
            continue
        name, num_lines = path.relative_to(package).as_posix(), count_lines(path)
        language = "python" if path.suffix == ".py" else "cuda"
        lines[language][part_of(path, package)] += num_lines
        if num_lines > limits["file"]:
            report.offenders.append(f"{name}: {num_lines} lines, at most {limits['file']}")
        if language == "python":
            report.offenders.extend(
                f"{name}:{start}: {function}() has {length} lines, at most {limits['function']}"
                for function, start, length in function_lengths(path.read_text(encoding="utf-8"))
                if length > limits["function"]
            )
    for language, counts in lines.items():
        _hold_parts(report, language, counts, budgets[language])
    return report


def _hold_parts(
    report: Report, language: str, counts: Counter[str], ceilings: Mapping[str, int]
) -> None:
    known: set[str] = set()
    for key, ceiling in ceilings.items():
        parts = key.split("+")
        known.update(parts)
        total = sum(counts[part] for part in parts)
        report.parts[f"{key} ({language})"] = (total, ceiling)
        if total > ceiling:
            report.offenders.append(f"{key}: {total} lines of {language}, at most {ceiling}")
    report.offenders.extend(
        f"{part}: has no budget for {language} in budgets.toml"
        for part in sorted(set(counts) - known)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, default=ROOT / "src" / "emberbox")
    parser.add_argument("--budgets", type=Path, default=ROOT / "budgets.toml")
    args = parser.parse_args()
    with args.budgets.open("rb") as file:
        report = measure(args.package, tomllib.load(file))
    for part, (num_lines, ceiling) in report.parts.items():
        if num_lines:
            print(f"{num_lines:6} / {ceiling:<6} {part}")
    for offender in report.offenders:
        print(f"too large: {offender}", file=sys.stderr)
    return 1 if report.offenders else 0


if __name__ == "__main__":
    sys.exit(main())
