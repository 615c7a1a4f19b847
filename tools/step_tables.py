"""Tables of docs/decoding.md, drawn from receipts and the summary. Knows no receipt's checks."""

import re
from collections.abc import Mapping, Sequence

from benchmarks.step_timeline import TRELLIS
from tools.figures import Figure, Receipt, Small
from tools.step_figures import QUALITY_FIGURES, SPEED_FIGURES, TIMELINE

NOTHING = "No receipt is there yet."
PROJECTED = f"projected.{Small.name}.step."
DRAWING = "step_timeline.png"
WHAT = {  # a kernel's name -> what it does in a decode step
    "spread_streams": "streams take up the last results; sums for the next mixing",
    "collapse_streams": "mixing, norm, rotation: the input of a sublayer",
    "close_streams": "after the last layer: mean of the streams, norm, rotation",
    "multiply_small": "plain products of few outputs: router, gates of KDA, indexer",
    "multiply_side_by_side": "products of attention, last product of a feed-forward part, head",
    "multiply_gate_up": "gate and up of shared experts and dense layers, SwiGLU, rotation",
    "kda_decode": "KDA: convolution, gates, norms, state, gated norm, rotation",
    "open_rows": "sparse attention: norms, cached rows, pooled keys",
    "score": "indexer: scores of pooled keys",
    "choose": "indexer: the best of them, as rows of the cache",
    "absorb": "sparse attention: queries through W_K",
    "attend": "sparse attention: over the chosen rows",
    "finish": "sparse attention: sums of runs, W_V, rotation",
    "sort_and_rotate": "router's choice, experts sorted, inputs rotated",
    "gate_up": "routed experts: gate and up, SwiGLU, rotation",
    "down": "routed experts: down, weighted sum",
    "multiply_rows": "a product of a few rows",
    "rotate": "rotation before a product",
    "activate": "SwiGLU, rotation",
    "greedy": "largest logit of each row",
}


def step_table(receipts: Mapping[str, Receipt], summary: Mapping[str, float]) -> str:
    """Speed, memory and small ops beside their bars."""
    return _figures(SPEED_FIGURES, receipts, summary)


def quality_table(receipts: Mapping[str, Receipt], summary: Mapping[str, float]) -> str:
    """Closeness beside its bars."""
    return _figures(QUALITY_FIGURES, receipts, summary)


def _figures(
    figures: Sequence[Figure], receipts: Mapping[str, Receipt], summary: Mapping[str, float]
) -> str:
    rows, names = [], []
    for figure in (each for each in figures if each.key in summary):
        value, sign = summary[figure.key], ">=" if figure.more_is_better else "<="
        bar = "" if figure.bar is None else f"{sign} {number(figure.bar)}"
        word = "" if figure.bar is None else "holds" if figure.holds(value) else "missed"
        found = figure.measure(receipts[figure.receipt])
        beside = "" if found is None else _beside(figure, found.limits, summary)
        cells = [number(value), figure.unit, bar, number(figure.aim), word, beside]
        rows.append([f"`{figure.key}`", *cells])
        names += [figure.receipt] if figure.receipt not in names else []
    if not rows:
        return NOTHING
    where = "\n".join(_source(name, receipts[name]) for name in names)
    head = ["figure", "measured", "unit", "bar", "aim", "", "beside"]
    return f"{where}\n\n{markdown(head, rows)}"


def _source(name: str, receipt: Receipt) -> str:
    """Where a receipt is from, and by which line where it says so."""
    command = receipt.content.get("command", "").partition(" -o ")[0]
    return f"- `{name}`: {origin(receipt)}" + (f"; `{command}`" if command else "")


def _beside(figure: Figure, limits: Mapping[str, float], summary: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(summary[f'{figure.key}.{name}'])}" for name in limits)


def timeline_table(receipts: Mapping[str, Receipt], has_drawing: bool) -> str:
    """Where the time of one step goes, by kernel, the largest sum first."""
    if TIMELINE not in receipts:
        return NOTHING
    receipt = receipts[TIMELINE]
    content, results = receipt.content, receipt.content["results"]
    whole = sum(row["us"] for row in content["by_kernel"])
    rows = [
        [f"`{row['name']}`", what(row["name"]), *_kernel_cells(row, whole)]
        for row in content["by_kernel"]
    ]
    lines = [
        f"{origin(receipt)}; one sequence, {content['context']:,} tokens behind it, with room for "
        f"{content['max_model_len']:,}. A step takes {results['step_ms']:.3f} ms, and "
        f"{results['traced_ms']:.3f} ms while it is traced, "
        f"of which products with the trellis {results['trellis_ms']:.3f} ms "
        f"and all else {results['small_ops_ms']:.3f} ms, "
        f"in {len(content['kernels'])} launches."
    ]
    if has_drawing:
        lines.append(f"Drawn: `receipts/h200/{DRAWING}`.")
    head = ["kernel", "what it does", "trellis", "launches", "us in all", "median us", "of the sum"]
    return "\n".join(lines) + "\n\n" + markdown(head, rows, num_texts=3)


def _kernel_cells(row: Mapping[str, float], whole: float) -> list[str]:
    is_trellis = "yes" if row["name"] in TRELLIS else ""
    us = [f"{row['us']:,.1f}", f"{row['median_us']:.2f}"]
    return [is_trellis, str(row["count"]), *us, f"{row['us'] / whole:.1%}"]


def what(kernel: str) -> str:
    """In words; a number behind its name is one of its forms."""
    known = WHAT.get(kernel) or WHAT.get(re.sub(r"_\d+$", "", kernel))
    return known or "of torch: copies, embedding, streams"


def step_projection_table(summary: Mapping[str, float]) -> str:
    """A line for each number."""
    rows = [
        [f"`{key.removeprefix(PROJECTED)}`", number(value)]
        for key, value in summary.items()
        if key.startswith(PROJECTED)
    ]
    return markdown(["projected", "value"], rows) if rows else NOTHING


def origin(receipt: Receipt) -> str:
    """Machine and commit."""
    content = receipt.content
    about = content.get("emberbox")
    commit = about["commit"] if isinstance(about, dict) else content["commit"]
    return f"{content['device']['name']}, commit {(commit or 'unknown')[:12]}"


def number(value: float | None) -> str:
    """As a cell shows it."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int = 1) -> str:
    """A table, whose first columns are texts."""
    rule = [*["---"] * num_texts, *["--:"] * (len(head) - num_texts)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *rows])
