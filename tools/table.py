"""Draw README.md of a folder of receipts from the receipts alone, every one verified first.

One table per panel, lane and reference, its rows by size; under it the commands that make a row
again; then pairs of candidates, as `emberbox receipt compare` puts it. table.toml in the folder:

natural = ["prose"]     # domains of the panel that are natural text, not drills: their own column
planned = ["base2-*"]   # receipts that need not be there (yet): what compares them waits for them
notes = ["..."]         # paragraphs under the introduction

[[pair]]                # one line of the comparison: `new` against `base`, names of receipts
base = "base2"
new = "ours2"
seeds = [0, 1, 2]       # may be left out; base-0 against new-0 and so on, then the mean over them

[texts]                 # digest of a text given by --text -> the command that makes it, its path
[before]                # commands that stand before a receipt's own; [after]: behind them
ours2-0 = ["emberbox ..."]

`--check` writes nothing and fails, with the difference, when the page is not what it should be.
"""

import argparse
import difflib
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from emberbox.errors import EmberboxError, MeasureError
from emberbox.measure.bootstrap import MIN_WINDOWS
from emberbox.measure.compare import comparable_key, compare_together
from emberbox.measure.receipt import Receipt, load
from emberbox.measure.show import (
    COMPARISON_COLUMNS,
    bits_per_weight,
    comparison_cells,
    figure_text,
    number,
    where,
)
from emberbox.measure.summary import headlines
from emberbox.measure.verify import verify

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Drawn by tools/table.py from the receipts beside it; `make table` renews it. -->"
PAGE, PLAN = "README.md", "table.toml"
NATURAL = "natural text"
CHANGED = " †"
SENSITIVITY = "sensitivity.json"
OUT = ".build/nano"  # where a row that is made again goes: nothing that is committed is replaced
INTRODUCTION = """Every figure is that of a receipt in this folder, whose record holds every
position: `emberbox receipt verify {folder}/*.json` computes it again. In brackets: 95 % interval
(BCa bootstrap over windows). KL is the mean over positions of KL(reference || candidate) in nats. A
figure means something only together with the panel and the lane above its table."""
AGAIN = f"""Any row can be made again from the repository's root, `emberbox` on the path, with the
commands under its table:

```sh
mkdir -p {OUT}
. .venv/bin/activate
```

`--device cuda` says that the row was made on a GPU. Without one leave these two words out, in every
line; nothing else changes. A measurement then adds up in another order, and figures may move in
their last digits. A compression keeps its calibration text in float32 on a CPU and in bfloat16 on a
GPU, and so finds other paths: a file of the same size, with figures of its own. The new receipt is
held against the committed one by
`emberbox receipt compare {{folder}}/NAME.json {OUT}/NAME.json`."""
LANES = {
    "weights": "Every weight decoded to float32, the network in plain torch, no cache: the error "
    "of the stored weights alone.",
    "served": "The engine's own prefill with its kernels, its activation type and its cache: what "
    "is served. No figure here belongs beside one of another lane.",
}
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
class Pair:
    """Names of receipts; with seeds "-SEED" is added to both."""

    base: str
    new: str
    seeds: tuple[int, ...] = ()

    @property
    def names(self) -> list[tuple[str, str]]:
        """(base, new) of each line."""
        if not self.seeds:
            return [(self.base, self.new)]
        return [(f"{self.base}-{seed}", f"{self.new}-{seed}") for seed in self.seeds]


@dataclass(frozen=True)
class Plan:
    """table.toml: domains of natural text, patterns of receipts that may be missing, pairs, and
    commands that a receipt cannot tell, by its name: what comes before its own and after. texts:
    digest of a text that was given by its path -> the command that makes it, and the path. notes:
    paragraphs of the page."""

    natural: tuple[str, ...] = ()
    planned: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    before: Mapping[str, Sequence[str]] = field(default_factory=dict)
    after: Mapping[str, Sequence[str]] = field(default_factory=dict)
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
    texts = (text.replace("{folder}", _place(folder)) for text in (INTRODUCTION, AGAIN))
    parts = [NOTE, "# Measured fidelity", *texts, *(note.strip() for note in plan.notes)]
    for found in sorted(groups.values(), key=lambda each: (-len(each), each[0].name)):
        parts += _section(found, plan)
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
    natural, planned = found.pop("natural", []), found.pop("planned", [])
    pairs, before = found.pop("pair", []), found.pop("before", {})
    after, made, notes = found.pop("after", {}), found.pop("texts", {}), found.pop("notes", [])
    names = [pair.get(key) for pair in pairs for key in ("base", "new")]
    texts = [*natural, *planned, *notes, *names]
    if any(not {"base", "new"} <= set(pair) <= {"base", "new", "seeds"} for pair in pairs):
        raise MeasureError(f"{path}: each [[pair]] has a base and a new, and nothing but seeds")
    seeds = [seed for pair in pairs for seed in pair.get("seeds", [])]
    if (
        found
        or not all(isinstance(t, str) for t in texts)
        or any(type(s) is not int for s in seeds)
    ):
        raise MeasureError(f"{path}: expected natural = [...] and [[pair]], got {sorted(found)}")
    return Plan(
        tuple(natural),
        tuple(planned),
        tuple(Pair(pair["base"], pair["new"], tuple(pair.get("seeds", ()))) for pair in pairs),
        before,
        after,
        made,
        tuple(notes),
    )


def _section(receipts: Sequence[Receipt], plan: Plan) -> Iterator[str]:
    """Receipts that may be compared: a table, and how to make each row again."""
    natural = plan.natural
    first = receipts[0]
    panel, results, reference = first["panel"], first["results"], first["reference"]
    ordered = sorted(receipts, key=lambda each: (each["candidate"]["num_bytes"], each.name))
    has_natural = bool(_natural_windows(first, natural))
    yield f"## Panel {panel['name']}, lane {first['lane']}"
    yield LANES[first["lane"]]
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
    """What made the candidate, where it says so, and what measured it, with the latter's paths; the
    new receipt goes to OUT."""
    words = shlex.split(receipt["command"])
    source, result = words[3:5]
    about = receipt["candidate"]["about"]
    lines = [*plan.before.get(receipt.name, ()), *_made_by(about, result)]
    places = {"SRC": source, "DST": result, SENSITIVITY: f"receipts/nano/recipes/{SENSITIVITY}"}
    text = about.get("tuning", {}).get("text", {}).get("sha256")
    if text in plan.texts:
        make, places["TEXT"] = plan.texts[text]
        lines.insert(0, make)
    filled = [" ".join(places.get(word, word) for word in line.split(" ")) for line in lines]
    if "-o" in words:
        words[words.index("-o") + 1] = f"{OUT}/{receipt.path.name}"
    return "\n".join([*filled, shlex.join(words), *plan.after.get(receipt.name, ())])


def _made_by(about: Mapping[str, Any], result: str) -> Iterator[str]:
    """What compressed the candidate and what tuned it, which has a folder of its own between."""
    compressed, tuning = about.get("command", []), about.get("tuning")
    lines = [compressed] if isinstance(compressed, str) else compressed
    if not isinstance(tuning, dict):
        yield from lines
        return
    between = Path(result).with_name(tuning["candidate"]["name"])
    for line in lines:
        yield line.replace(" DST", f" {between}", 1)
    yield tuning["command"].replace(" CANDIDATE", f" {between}", 1)


def _pairs(folder: Path, receipts: dict[str, Receipt], plan: Plan) -> Iterator[str]:
    """The comparisons that table.toml names, of receipts that are there."""
    rows: list[list[str]] = []
    commands = []
    for pair in plan.pairs:
        found = [
            (receipts[base], receipts[new])
            for base, new in pair.names
            if _is_there(folder, receipts, plan, base, new)
        ]
        for base, new in found:
            rows += _lines(f"{new.name} against {base.name}", [(base, new)], plan)
            places = (_place(receipt.path) for receipt in (base, new))
            commands.append("emberbox receipt compare " + " ".join(places))
        if len(found) > 1:
            seeds = ", ".join(new.name.rpartition("-")[2] for _, new in found)
            title = f"**{pair.new} against {pair.base}, mean over seeds {seeds}**"
            rows += _lines(title, found, plan)
    if not rows:
        return
    yield "## Pairs"
    yield (
        "The same windows under two candidates: mean KL, its difference (below 0 the new one is "
        "closer), windows that got better or worse, and the exact two-sided sign test over them. "
        "In a mean over seeds each window counts once, with the mean of its seeds."
    )
    head = ("pair", "panel, lane", "bytes, new to base", "of", *COMPARISON_COLUMNS)
    yield _markdown(head, rows)
    yield "Domain by domain:\n\n```sh\n" + "\n".join(commands) + "\n```"


def _is_there(folder: Path, receipts: Mapping[str, Receipt], plan: Plan, *names: str) -> bool:
    """Whether all are. Raises MeasureError for one that is missing and is not planned."""
    missing = [name for name in names if name not in receipts]
    for name in missing:
        if not any(fnmatchcase(name, pattern) for pattern in plan.planned):
            raise MeasureError(f"{folder / PLAN}: there is no receipt {name!r}")
    return not missing


def _lines(title: str, pairs: Sequence[tuple[Receipt, Receipt]], plan: Plan) -> Iterator[list[str]]:
    """Over all windows and, where there are enough, over those of natural text."""
    base, _ = pairs[0]
    sizes = [sum(pair[side]["candidate"]["num_bytes"] for pair in pairs) for side in (0, 1)]
    start = [title, where(base), f"{100 * (sizes[1] / sizes[0] - 1):+.3f} %"]
    yield [*start, "all", *comparison_cells(compare_together(pairs))]
    if len(_natural_windows(base, plan.natural)) >= MIN_WINDOWS:
        yield [*start, NATURAL, *comparison_cells(compare_together(pairs, plan.natural))]


def _place(path: Path) -> str:
    """From the repository's root, if it lies there."""
    whole = path.resolve()
    return str(whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else path)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
