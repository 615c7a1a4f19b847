"""Write receipts/h200/summary.json and tables of docs/ from the receipts beside it.

    python -m tools.summarise [--check] [--bars]

summary.json is one flat object; a key is a figure of tools/figures.py or tools/step_figures.py, or
one of its limits after a further dot, or begins with "projected.".

`--check` writes nothing, says which bars hold, and fails when a file is not what it should be.
`--bars` fails, besides, when a bar does not hold, or a receipt lacks the run that it is about.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.figures import FIGURES, Figure, Receipt, Small, projection
from tools.receipts import KERNELS, read_receipts
from tools.step_figures import STEP_FIGURES, TIMELINE, step_projection
from tools.step_tables import (
    DRAWING,
    NOTHING,
    PROJECTED,
    markdown,
    number,
    origin,
    quality_table,
    step_projection_table,
    step_table,
    timeline_table,
)

ROOT = Path(__file__).resolve().parents[1]
FOLDER, SUMMARY = "receipts/h200", "summary.json"
PAGE, STEP_PAGE = "docs/kernels.md", "docs/decoding.md"
EVERY = (*FIGURES, *STEP_FIGURES)
PROJECTED_RATES = (2.0, 3.0, 4.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail when a file is out of date")
    parser.add_argument("--bars", action="store_true", help="fail when a bar does not hold")
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args()
    receipts = read_receipts(args.root / FOLDER)
    summary = summarise(receipts)
    for line in verdicts(receipts, summary):
        print(line)
    stale = [path for path, text in files(args.root, receipts, summary) if _old(path) != text]
    if args.check and stale:
        print(f"out of date: {', '.join(map(str, stale))}; run `make table`", file=sys.stderr)
        return 1
    for path, text in files(args.root, receipts, summary) if not args.check else ():
        path.unlink(missing_ok=True) if text is None else path.write_text(text, encoding="utf-8")
    return int(args.bars and not all(_holds(figure, summary) for figure in _demanded(receipts)))


def summarise(receipts: Mapping[str, Receipt]) -> dict[str, float]:
    """The flat object: every figure whose receipt is there, its limits, and the projection."""
    summary: dict[str, float] = {}
    for figure in (each for each in EVERY if each.receipt in receipts):
        measured = figure.measure(receipts[figure.receipt])
        if measured is None:
            continue
        summary[figure.key] = rounded(measured.value)
        for name, limit in measured.limits.items():
            summary[f"{figure.key}.{name}"] = rounded(limit)
    for k in PROJECTED_RATES if KERNELS in receipts else ():
        for name, value in projection(receipts[KERNELS], Small(), k).items():
            summary[f"projected.{Small.name}.k{k:g}.{name}"] = rounded(value)
    if TIMELINE in receipts:
        for name, value in step_projection(receipts[TIMELINE], Small()).items():
            summary[f"{PROJECTED}{name}"] = rounded(value)
    return summary


def rounded(value: float) -> float:
    """Four digits that count."""
    return float(f"{value:.4g}")


def verdicts(receipts: Mapping[str, Receipt], summary: Mapping[str, float]) -> Iterator[str]:
    """A line for each figure with a bar whose receipt is there."""
    for figure in _demanded(receipts):
        sign = ">=" if figure.more_is_better else "<="
        word = "holds " if _holds(figure, summary) else "MISSED"
        value = f"{summary[figure.key]:g}" if figure.key in summary else "no such run"
        aim = "" if figure.aim is None else f", aim {figure.aim:g}"
        yield f"{word} {figure.key}: {value}, bar {sign} {figure.bar:g}{aim}"


def _demanded(receipts: Mapping[str, Receipt]) -> Iterator[Figure]:
    return (each for each in EVERY if each.bar is not None and each.receipt in receipts)


def _holds(figure: Figure, summary: Mapping[str, float]) -> bool:
    return figure.key in summary and figure.holds(summary[figure.key])


def files(
    root: Path, receipts: Mapping[str, Receipt], summary: Mapping[str, float]
) -> Iterator[tuple[Path, str | None]]:
    """What each file should hold; None: it should not be there."""
    text = json.dumps(summary, indent=1) + "\n" if summary else None
    yield root / FOLDER / SUMMARY, text
    kernels = {
        "figures": figure_table(receipts, summary),
        "projection": projection_table(summary),
    }
    has_drawing = (root / FOLDER / DRAWING).exists()
    step = {
        "figures": step_table(receipts, summary),
        "timeline": timeline_table(receipts, has_drawing),
        "quality": quality_table(receipts, summary),
        "projection": step_projection_table(summary),
    }
    yield root / PAGE, drawn(root / PAGE, kernels)
    yield root / STEP_PAGE, drawn(root / STEP_PAGE, step)


def drawn(page: Path, blocks: Mapping[str, str]) -> str:
    """The page with its blocks between their markers. Raises SystemExit where one is missing."""
    content = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        before, mark, rest = content.partition(f"<!-- {name}: drawn by tools/summarise.py -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise SystemExit(f"{page}: has no place for {name}")
        content = f"{before}{mark}\n{block}\n\n{end}{after}"
    return content


def figure_table(receipts: Mapping[str, Receipt], summary: Mapping[str, float]) -> str:
    """Every figure of a kernel beside its bar and its limits."""
    if KERNELS not in receipts:
        return NOTHING
    head = ["figure", "measured", "unit", "bar", "aim", "limit by bytes", "limit by decoding",
            "of the nearer limit"]  # fmt: skip
    rows = [_figure_row(figure, summary) for figure in FIGURES if figure.key in summary]
    return f"{origin(receipts[KERNELS])}:\n\n{markdown(head, rows)}"


def _figure_row(figure: Figure, summary: Mapping[str, float]) -> list[str]:
    key, value = figure.key, summary[figure.key]
    limits = {name: summary.get(f"{key}.{name}_limit") for name in ("bytes", "decode", "dense")}
    known = [limit for limit in limits.values() if limit is not None]
    near = (min(known) if figure.more_is_better else max(known)) if known else None
    part = None if near is None else (value / near if figure.more_is_better else near / value)
    decode = limits["decode"] if limits["decode"] is not None else limits["dense"]
    cells = [number(each) for each in (figure.bar, figure.aim, limits["bytes"], decode)]
    return [f"`{key}`", number(value), figure.unit, *cells, "" if part is None else f"{part:.0%}"]


def projection_table(summary: Mapping[str, float]) -> str:
    """Rates side by side."""
    start = f"projected.{Small.name}."
    found: dict[str, dict[str, float]] = {}
    for key, value in summary.items():
        if key.startswith(start) and not key.startswith(PROJECTED):
            rate, _, name = key.removeprefix(start).partition(".")
            found.setdefault(rate, {})[name] = value
    if not found:
        return NOTHING
    first = next(iter(found.values()))
    rows = [[f"`{name}`", *(number(each[name]) for each in found.values())] for name in first]
    return markdown(["projected", *found], rows)


def _old(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
