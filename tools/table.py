"""Draw README.md of a folder of receipts from the receipts alone, every one verified first.

One table per panel, lane and reference, its rows by size; under it the commands that make a row
again; then pairs of candidates, as `emberbox receipt compare` puts it. table.toml in the folder:

natural = ["prose"]     # domains of the panel that are natural text, not drills: their own column

[[pair]]                # one line of the comparison: `new` against `base`, names of receipts
base = "base2-plain"
new = "base2-ours"

[before]                # commands that stand before a receipt's own
base2-ours = ["emberbox ..."]

`--check` writes nothing and fails, with the difference, when the page is not what it should be.
"""

import argparse
import difflib
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from emberbox.errors import EmberboxError, MeasureError
from emberbox.measure.compare import comparable_key, compare
from emberbox.measure.receipt import Receipt, load
from emberbox.measure.show import (
    COMPARISON_COLUMNS,
    bits_per_weight,
    comparison_cells,
    figure_text,
    number,
)
from emberbox.measure.summary import headlines
from emberbox.measure.verify import verify

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Drawn by tools/table.py from the receipts beside it; `make table` renews it. -->"
PAGE, PLAN = "README.md", "table.toml"
NATURAL = "natural text"
CHANGED = " †"
SENSITIVITY = "sensitivity.json"
INTRODUCTION = """Every figure is that of a receipt in this folder, whose record holds every
position: `emberbox receipt verify NAME.json` computes it again. In brackets: 95 % interval (BCa
bootstrap over windows). KL is the mean over positions of KL(reference || candidate) in nats. A
figure means something only together with the panel and the lane above its table."""
HEAD = (
    "receipt",
    "bytes",
    "bits per weight",
    "KL",
    "reverse KL",
    "top-1",
    "top-5",
    "perplexity",
)


@dataclass(frozen=True)
class Plan:
    """table.toml: domains of natural text, pairs (base, new) of receipts, and commands that a
    receipt cannot tell, by its name: what comes before its own."""

    natural: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    before: Mapping[str, Sequence[str]] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail when the page is out of date")
    parser.add_argument("--folder", type=Path, default=ROOT / "receipts" / "nano")
    args = parser.parse_args()
    try:
        new = draw(args.folder)
    except EmberboxError as error:
        print(error, file=sys.stderr)
        return 1
    path = args.folder / PAGE
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if old == new:
        return 0
    if not args.check:
        path.write_text(new, encoding="utf-8")
        print(f"wrote {path}")
        return 0
    lines = old.splitlines(), new.splitlines()
    print("\n".join(difflib.unified_diff(*lines, "as it is", "as it should be", lineterm="")))
    print(f"{path} is out of date; run `make table`", file=sys.stderr)
    return 1


def draw(folder: Path) -> str:
    """The page. Raises MeasureError when a receipt is not good, or there is none."""
    receipts = read_receipts(folder)
    plan = read_plan(folder / PLAN)
    groups: dict[tuple[object, ...], list[Receipt]] = {}
    for receipt in receipts.values():
        groups.setdefault(comparable_key(receipt), []).append(receipt)
    domains = {domain for receipt in receipts.values() for _, domain in receipt.windows}
    if strays := sorted(set(plan.natural) - domains):
        raise MeasureError(f"{folder / PLAN}: natural: no window is of {', '.join(strays)}")
    parts = [NOTE, "# Measured fidelity", INTRODUCTION]
    for found in sorted(groups.values(), key=lambda each: (-len(each), each[0].name)):
        parts += _section(found, plan)
    if plan.pairs:
        parts += _pairs(folder, receipts, plan)
    return "\n\n".join(parts) + "\n"


def read_receipts(folder: Path) -> dict[str, Receipt]:
    """Every receipt of `folder` by its name, each of them good."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise MeasureError(f"{folder}: holds no receipt")
    problems = [f"{path.name}: {problem}" for path in paths for problem in verify(path)]
    if problems:
        raise MeasureError(f"{folder}: crooked receipts\n  - " + "\n  - ".join(problems))
    return {path.stem: load(path) for path in paths}


def read_plan(path: Path) -> Plan:
    """table.toml; without one, no natural text and no pairs. Raises MeasureError."""
    if not path.exists():
        return Plan()
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise MeasureError(f"{path}: not TOML: {error}") from None
    natural, pairs = found.pop("natural", []), found.pop("pair", [])
    before = found.pop("before", {})
    texts = [*natural, *(value for pair in pairs for value in pair.values())]
    if found or not all(isinstance(text, str) for text in texts):
        raise MeasureError(f"{path}: expected natural = [...] and [[pair]], got {sorted(found)}")
    if any(set(pair) != {"base", "new"} for pair in pairs):
        raise MeasureError(f"{path}: each [[pair]] has a base and a new, and nothing else")
    return Plan(tuple(natural), tuple((pair["base"], pair["new"]) for pair in pairs), before)


def _section(receipts: Sequence[Receipt], plan: Plan) -> Iterator[str]:
    """Receipts that may be compared: a table, and how to make each row again."""
    natural = plan.natural
    first = receipts[0]
    panel, results, reference = first["panel"], first["results"], first["reference"]
    ordered = sorted(receipts, key=lambda each: (each["candidate"]["num_bytes"], each.name))
    has_natural = bool(_natural_windows(first, natural))
    yield f"## Panel {panel['name']}, lane {first['lane']}"
    yield (
        f"Against {reference['name']} (weights {reference['map_sha256'][:12]}, perplexity "
        f"{number(results['reference_perplexity']['value'])}), on {len(panel['windows'])} windows "
        f"with {results['positions']:,} positions (panel {panel['sha256'][:12]})."
    )
    head = (*HEAD, f"KL, {NATURAL}") if has_natural else HEAD
    yield _markdown(head, [_row(each, natural if has_natural else ()) for each in ordered])
    if not all(_is_of_a_commit(receipt) for receipt in receipts):
        yield f"{CHANGED.strip()}: measured by sources that differ from the commit in the receipt."
    for receipt in ordered:
        yield f"{receipt.name}:\n\n```sh\n{_commands(receipt, plan)}\n```"


def _row(receipt: Receipt, natural: Sequence[str]) -> list[str]:
    results, candidate = receipt["results"], receipt["candidate"]
    cells = [
        f"[{receipt.name}]({receipt.path.name}){'' if _is_of_a_commit(receipt) else CHANGED}",
        f"{candidate['num_bytes']:,}",
        f"{bits_per_weight(candidate):.3f}",
        figure_text(results["kl"]),
        figure_text(results["reverse_kl"]),
        figure_text(results["top1"], is_share=True),
        figure_text(results["top5"], is_share=True),
        figure_text(results["candidate_perplexity"]),
    ]
    if natural:
        record = receipt.read_record()
        windows = [record[name] for name in _natural_windows(receipt, natural)]
        cells.append(figure_text(headlines(windows)["kl"]))
    return cells


def _is_of_a_commit(receipt: Receipt) -> bool:
    """Or of an installed package, which has none."""
    made_by = receipt["emberbox"]
    return bool(made_by["is_clean"] or not made_by["commit"])


def _natural_windows(receipt: Receipt, natural: Sequence[str]) -> list[str]:
    return [name for name, domain in receipt.windows if domain in natural]


def _commands(receipt: Receipt, plan: Plan) -> str:
    """What made the candidate, where it says so, and what measured it, with the latter's paths."""
    made = receipt["candidate"]["about"].get("command", [])
    lines = [*plan.before.get(receipt.name, ()), *([made] if isinstance(made, str) else made)]
    source, result = shlex.split(receipt["command"])[3:5]
    places = {"SRC": source, "DST": result, SENSITIVITY: f"receipts/nano/recipes/{SENSITIVITY}"}
    filled = [" ".join(places.get(word, word) for word in line.split(" ")) for line in lines]
    return "\n".join([*filled, receipt["command"]])


def _pairs(folder: Path, receipts: dict[str, Receipt], plan: Plan) -> Iterator[str]:
    """The comparisons that table.toml names."""
    rows, commands = [], []
    for names in plan.pairs:
        for name in names:
            if name not in receipts:
                raise MeasureError(f"{folder / PLAN}: there is no receipt {name!r}")
        base, new = (receipts[name] for name in names)
        found = compare(base, new, {NATURAL: plan.natural})
        more = f"{100 * (found.new_bytes / found.base_bytes - 1):+.3f} %"
        where = f"{found.panel}, {found.lane}"
        for group, paired in {"all": found.all, **found.groups}.items():
            if group in ("all", NATURAL):
                title = f"{new.name} against {base.name}"
                rows.append([title, where, more, group, *comparison_cells(paired)])
        commands.append(f"emberbox receipt compare {base.path.name} {new.path.name}")
    yield "## Pairs"
    yield (
        "The same windows under two candidates: mean KL, its difference (below 0 the new one is "
        "closer), windows that got better or worse, and the exact two-sided sign test over them."
    )
    head = ("pair", "panel, lane", "bytes, new to base", "of", *COMPARISON_COLUMNS)
    yield _markdown(head, rows)
    yield "Domain by domain:\n\n```sh\n" + "\n".join(commands) + "\n```"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
