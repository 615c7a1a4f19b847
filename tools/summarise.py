"""Write receipts/h200/summary.json and the tables of docs/kernels.md from the receipts beside it.

    python -m tools.summarise [--check] [--bars]

summary.json is one flat object; a key is a figure of tools/figures.py, or one of its limits after a
further dot, or begins with "projected.".

`--check` writes nothing, says which bars hold, and fails when a file is not what it should be.
`--bars` fails, besides, when a bar does not hold.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from tools.figures import FIGURES, Figure, Receipt, Small, projection

ROOT = Path(__file__).resolve().parents[1]
FOLDER, PAGE, SUMMARY = "receipts/h200", "docs/kernels.md", "summary.json"
KERNELS = "kernels.json"
PROJECTED_RATES = (2.0, 3.0, 4.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail when a file is out of date")
    parser.add_argument("--bars", action="store_true", help="fail when a bar does not hold")
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args()
    receipts = read_receipts(args.root / FOLDER)
    summary = summarise(receipts)
    for line in verdicts(summary):
        print(line)
    stale = [path for path, text in files(args.root, receipts, summary) if _old(path) != text]
    if args.check and stale:
        print(f"out of date: {', '.join(map(str, stale))}; run `make table`", file=sys.stderr)
        return 1
    for path, text in files(args.root, receipts, summary) if not args.check else ():
        path.unlink(missing_ok=True) if text is None else path.write_text(text, encoding="utf-8")
    missed = [f.key for f in FIGURES if f.key in summary and not f.holds(summary[f.key])]
    return int(bool(args.bars and missed))


def read_receipts(folder: Path) -> dict[str, Receipt]:
    """By their names. Raises SystemExit for one whose figures are not those that were written."""
    found = {}
    for name in sorted({figure.receipt for figure in FIGURES}):
        path = folder / name
        if not path.exists():
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        raw = {"cases": content["cases"], "code": content["code"]}
        if sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest() != content["raw_sha256"]:
            raise SystemExit(f"{path}: its figures are not those that its raw_sha256 is of")
        found[name] = Receipt(content)
    return found


def summarise(receipts: Mapping[str, Receipt]) -> dict[str, float]:
    """The flat object: every figure whose receipt is there, its limits, and the projection."""
    summary: dict[str, float] = {}
    for figure in FIGURES:
        if figure.receipt not in receipts:
            continue
        measured = figure.measure(receipts[figure.receipt])
        summary[figure.key] = rounded(measured.value)
        for name, limit in measured.limits.items():
            summary[f"{figure.key}.{name}"] = rounded(limit)
    for k in PROJECTED_RATES if KERNELS in receipts else ():
        for name, value in projection(receipts[KERNELS], Small(), k).items():
            summary[f"projected.{Small.name}.k{k:g}.{name}"] = rounded(value)
    return summary


def rounded(value: float) -> float:
    """Four digits that count."""
    return float(f"{value:.4g}")


def verdicts(summary: Mapping[str, float]) -> Iterator[str]:
    """A line for each figure with a bar."""
    for figure in (each for each in FIGURES if each.bar is not None and each.key in summary):
        value, sign = summary[figure.key], ">=" if figure.more_is_better else "<="
        word = "holds " if figure.holds(value) else "MISSED"
        aim = "" if figure.aim is None else f", aim {figure.aim:g}"
        yield f"{word} {figure.key}: {value:g}, bar {sign} {figure.bar:g}{aim}"


def files(
    root: Path, receipts: Mapping[str, Receipt], summary: Mapping[str, float]
) -> Iterator[tuple[Path, str | None]]:
    """What each file should hold; None: it should not be there."""
    text = json.dumps(summary, indent=1) + "\n" if summary else None
    yield root / FOLDER / SUMMARY, text
    page = root / PAGE
    blocks = {"figures": figure_table(receipts, summary), "projection": projection_table(summary)}
    content = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        before, mark, rest = content.partition(f"<!-- {name}: drawn by tools/summarise.py -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise SystemExit(f"{page}: has no place for {name}")
        content = f"{before}{mark}\n{block}\n\n{end}{after}"
    yield page, content


def figure_table(receipts: Mapping[str, Receipt], summary: Mapping[str, float]) -> str:
    """Every figure beside its bar and its limits."""
    if not summary:
        return "No receipt is there yet."
    about = receipts[KERNELS].content
    where = f"{about['device']['name']}, commit {about['commit'][:12] or 'unknown'}"
    head = ["figure", "measured", "unit", "bar", "aim", "limit by bytes", "limit by decoding",
            "of the nearer limit"]  # fmt: skip
    rows = [_figure_row(figure, summary) for figure in FIGURES if figure.key in summary]
    return f"{where}:\n\n{_markdown(head, rows)}"


def _figure_row(figure: Figure, summary: Mapping[str, float]) -> list[str]:
    key, value = figure.key, summary[figure.key]
    limits = {name: summary.get(f"{key}.{name}_limit") for name in ("bytes", "decode", "dense")}
    known = [limit for limit in limits.values() if limit is not None]
    near = (min(known) if figure.more_is_better else max(known)) if known else None
    part = None if near is None else (value / near if figure.more_is_better else near / value)
    decode = limits["decode"] if limits["decode"] is not None else limits["dense"]
    cells = [_number(each) for each in (figure.bar, figure.aim, limits["bytes"], decode)]
    return [f"`{key}`", _number(value), figure.unit, *cells, "" if part is None else f"{part:.0%}"]


def projection_table(summary: Mapping[str, float]) -> str:
    """Rates side by side."""
    start = f"projected.{Small.name}."
    found: dict[str, dict[str, float]] = {}
    for key, value in summary.items():
        if key.startswith(start):
            rate, _, name = key.removeprefix(start).partition(".")
            found.setdefault(rate, {})[name] = value
    if not found:
        return "No receipt is there yet."
    first = next(iter(found.values()))
    rows = [[f"`{name}`", *(_number(each[name]) for each in found.values())] for name in first]
    return _markdown(["projected", *found], rows)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _old(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
