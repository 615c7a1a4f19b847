"""Receipts and comparisons for people. A figure never stands alone: panel, lane, interval with it.

Takes every word from the receipt; computes nothing but bits per weight.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from emberbox.measure.bootstrap import MIN_WINDOWS
from emberbox.measure.compare import Comparison, Paired
from emberbox.measure.receipt import Receipt

_WIDTH = 120
COMPARISON_COLUMNS = (
    "windows",
    "base",
    "new",
    "new - base [95 %]",
    "relative",
    "better / worse / tied",
    "sign p",
)
# figure -> (what a reader calls it, whether it is a share)
NAMES = {
    "kl": ("mean KL, nats", False),
    "reverse_kl": ("mean KL the other way", False),
    "top1": ("top-1 agreement", True),
    "top5": ("top-5 agreement", True),
    "reference_perplexity": ("perplexity, reference", False),
    "candidate_perplexity": ("perplexity, candidate", False),
}
_SPREAD = {
    "p50": "KL, median position",
    "p95": "KL, 95th of 100",
    "p99": "KL, 99th of 100",
    "cvar95": "KL, mean of worst 5 %",
    "max": "KL, worst position",
}


def show(receipt: Receipt) -> RenderableType:
    """The whole receipt, for a terminal."""
    parts: list[RenderableType] = [_about(receipt), _figures(receipt), _domains(receipt)]
    non_finite = receipt["results"]["non_finite"]
    if non_finite:
        text = f"{non_finite} positions have logits that are not finite; no figure counts them"
        parts.insert(1, Text(text, style="bold red"))
    return Group(*parts)


def show_comparison(found: Comparison) -> RenderableType:
    """Two candidates on the same windows, for a terminal."""
    title = f"{found.new} against {found.base} on {found.panel}, {found.lane}: mean KL in nats"
    table = _table(title, *COMPARISON_COLUMNS)
    for name, paired in {"all": found.all, **found.groups}.items():
        table.add_row(*(Text(cell) for cell in (name, *comparison_cells(paired))))
    parts: list[RenderableType] = [table, Text(_verdict(found)), Text(_sizes(found))]
    if found.left_out:
        parts.append(Text(f"{found.left_out} positions are left out: not finite", "bold red"))
    if found.reference_nll_difference:
        text = f"the reference differs between the two by {found.reference_nll_difference:.2g}"
        parts.append(Text(f"{text} nats a token on average: other device or kernels"))
    return Group(*parts)


def _verdict(found: Comparison) -> str:
    """Which of the two is closer, if the interval over windows says so."""
    paired = found.all
    if not paired.difference:
        return "no difference"
    if paired.interval is None or paired.interval[0] <= 0 <= paired.interval[1]:
        return "not decided: the interval holds 0" if paired.interval else "too few windows to say"
    where = "closer to" if paired.difference < 0 else "farther from"
    return f"{found.new} is {where} the reference than {found.base}"


def plain_text(shown: RenderableType) -> str:
    """The same without colours, for files and logs."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def comparison_cells(paired: Paired) -> list[str]:
    """What a row says under COMPARISON_COLUMNS, after the name of its windows."""
    return [
        str(paired.windows),
        number(paired.base_kl),
        number(paired.new_kl),
        f"{'+' if paired.difference > 0 else ''}{number(paired.difference)} "
        f"{interval(paired.interval)}",
        "none" if paired.relative is None else f"{100 * paired.relative:+.1f} %",
        f"{paired.better}/{paired.worse}/{paired.ties}",
        f"{paired.p_value:.2g}",
    ]


def figure_text(figure: Mapping[str, Any], *, is_share: bool = False) -> str:
    """A figure with its interval: "0.1216 [0.1107, 0.1334]"."""
    value = (share if is_share else number)(figure["value"])
    return f"{value} {interval(figure['interval'], is_share=is_share)}"


def number(value: float | None) -> str:
    """Four digits; "none" for what could not be computed, "0" for exactly zero."""
    if not value:
        return "none" if value is None else "0"
    return f"{value:#.4g}".removesuffix(".")


def share(value: float | None) -> str:
    """0.889 as "88.90 %"."""
    return "none" if value is None else f"{100 * value:.2f} %"


def interval(bounds: Sequence[float] | None, *, is_share: bool = False) -> str:
    """Both bounds, or why there are none."""
    if bounds is None:
        return f"[under {MIN_WINDOWS} windows]"
    low, high = (share(bound) if is_share else number(bound) for bound in bounds)
    return f"[{low}, {high}]"


def bits_per_weight(artifact: Mapping[str, Any]) -> float:
    """Over all tensors, scales and what is not compressed included."""
    num_weights: int = sum(part["weights"] for part in artifact["storage"])
    return float(8 * artifact["num_bytes"] / num_weights)


def where(receipt: Receipt) -> str:
    """Panel and lane, without which no figure means anything."""
    return f"{receipt['panel']['name']}, {receipt['lane']}"


def _about(receipt: Receipt) -> Table:
    """What was measured, of what, with what."""
    table = Table(title=Text(f"receipt {receipt.name}"), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in _facts(receipt).items():
        table.add_row(key, Text(value))
    return table


def _facts(receipt: Receipt) -> dict[str, str]:
    panel, code, runs = receipt["panel"], receipt["emberbox"], receipt["runs"]
    results = receipt["results"]
    same = len(set(runs["record_sha256"])) == 1
    spread = "equal to the last bit" if same else f"mean KL differs by {runs['kl_spread']:.2g}"
    commit = f", commit {code['commit'][:12]}" if code["commit"] else ""
    changed = "" if code["is_clean"] or not commit else " with changes"
    device = receipt["device"]
    return {
        "candidate": _artifact(receipt["candidate"]),
        "reference": _artifact(receipt["reference"]),
        "panel": f"{panel['name']} ({panel['sha256'][:12]}): {len(panel['windows'])} windows, "
        f"{results['positions']:,} positions",
        "lane": f"{receipt['lane']}; {receipt['direction']}, head: {receipt['head_policy']}, "
        f"sums in {receipt['accumulation']}",
        "cold runs": f"{runs['count']}, {spread}" if runs["count"] > 1 else "1: not repeated",
        "device": ", ".join(str(device[key]) for key in ("name", "torch") if key in device),
        "emberbox": f"{code['version']}{commit}{changed}",
        "again": receipt["command"],
    }


def _artifact(artifact: Mapping[str, Any]) -> str:
    return (
        f"{artifact['name']} ({artifact['map_sha256'][:12]}): {artifact['num_bytes']:,} bytes, "
        f"{bits_per_weight(artifact):.3f} bits per weight"
    )


def _figures(receipt: Receipt) -> Table:
    results = receipt["results"]
    table = _table("all windows", "value [95 % interval]", "panel, lane")
    for key, (name, is_share) in NAMES.items():
        figure = figure_text(results[key], is_share=is_share)
        table.add_row(name, Text(figure), Text(where(receipt)))
    for key, name in _SPREAD.items():
        table.add_row(name, number(results["kl_spread"][key]), Text(where(receipt)))
    return table


def _domains(receipt: Receipt) -> Table:
    columns = ("windows", "KL [95 % interval]", "top-1 [95 % interval]")
    table = _table(f"by domain, of {where(receipt)}", *columns)
    for each in receipt["results"]["domains"]:
        figures = figure_text(each["kl"]), figure_text(each["top1"], is_share=True)
        cells = (each["domain"], str(each["windows"]), *figures)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(Text(name), justify="right", overflow="fold")  # no digit is cut
    return table


def _sizes(found: Comparison) -> str:
    more = 100 * (found.new_bytes / found.base_bytes - 1)
    return (
        f"{found.base}: {found.base_bytes:,} bytes; {found.new}: {found.new_bytes:,} bytes "
        f"({more:+.3f} %)"
    )
