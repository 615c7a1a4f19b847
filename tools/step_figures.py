"""Figures of a whole decode step of the full-size model: from which receipt, its bar and its aim.

Speeds come from receipts of `emberbox measure speed`, kernels from benchmarks/step_timeline.py, and
closeness from benchmarks/decode_quality.py. A run that a receipt does not have has no figure. What
is said of a GB10 is a projection.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.step_timeline import MODEL, TRELLIS
from tools.figures import BYTES_PER_SECOND, CLOCK_HZ, Figure, Measured, Receipt, Small

SPEED, PEAK = "speed.json", "speed_peak.json"
TIMELINE, QUALITY = "step_timeline.json", "decode_quality.json"
BYTES_PER_TOKEN = 7.3e9  # of the published recipe's weights, head in 6 bits, and 32 K of context
TRELLIS_WEIGHTS = 16.33e9  # that a token is multiplied with
WEIGHTS_PER_CLOCK = 25  # of a multiprocessor: about what the instructions of decoding allow
MULTIPROCESSORS = 132
BOX_BYTES_PER_SECOND = (240e9, 273e9)  # taken to be reached; of the data sheet
CONTEXT, LONGEST = 1_024, 262_144
FIRST = "decode_tok_s.c1.ctx1k"
PEAK_SETTINGS = {
    "max_model_len": LONGEST,
    "max_running": 1,
    "snapshot_bytes": 0,
    "prefill_tokens": 4_096,
    "cache_dtype": "auto",
}
# Launches of one step of the model, at least: 34 layers with KDA, 11 sparse, 42 with experts. A
# kernel may have several forms, told apart by a number behind its name.
LAUNCHES = {
    **dict.fromkeys(("spread_streams", "collapse_streams"), 90),
    **dict.fromkeys(("multiply_small", "multiply_side_by_side", "multiply_gate_up"), 45),
    "kda_decode": 34,
    **dict.fromkeys(("open_rows", "score", "choose", "absorb", "attend", "finish"), 11),
    **dict.fromkeys(("sort_and_rotate", "gate_up", "down"), 42),
    **dict.fromkeys(("close_streams", "greedy"), 1),
}
WALL_OPTIONS = {"prompt_tokens": 128, "reply_tokens": 400}
Measure = Callable[[Receipt], Measured | None]


def limit_ms() -> float:
    """Of a token: bytes over what a copy reaches, or weights over what decoding allows."""
    per_second = WEIGHTS_PER_CLOCK * MULTIPROCESSORS * CLOCK_HZ
    return 1e3 * max(BYTES_PER_TOKEN / BYTES_PER_SECOND, TRELLIS_WEIGHTS / per_second)


# -- measures ------------------------------------------------------------------------------------


def result(key: str) -> Measure:
    """As the receipt says it."""

    def measure(receipt: Receipt) -> Measured | None:
        value = _results(receipt).get(key)
        return None if value is None else Measured(value)

    return measure


def relative(key: str) -> Measure:
    """A speed by that at the first context."""

    def measure(receipt: Receipt) -> Measured | None:
        results = _results(receipt)
        found = key in results and FIRST in results
        return Measured(results[key] / results[FIRST]) if found else None

    return measure


def step(tokens: int) -> Measure:
    """Median time of a step of so many tokens of one sequence, and its ratio to one token."""

    def measure(receipt: Receipt) -> Measured | None:
        results = _results(receipt)
        _expect(SPEED, receipt.content["options"]["contexts"][0], CONTEXT, "its first context")
        if (value := results.get(f"step_ms.m{tokens}")) is None:
            return None
        return Measured(value, {"ratio": value / results["step_ms.m1"]} if tokens > 1 else {})

    return measure


def wall(requests: int) -> Measure:
    """Tokens of all replies over the time from the first submission to the last token."""

    def measure(receipt: Receipt) -> Measured | None:
        for name, expected in WALL_OPTIONS.items():
            _expect(SPEED, receipt.content["options"][name], expected, name)
        return result(f"decode_tok_s.c{requests}.wall")(receipt)

    return measure


def limit(_: Receipt) -> Measured:
    """It depends on no receipt, and is said where there is something to hold against it."""
    return Measured(limit_ms())


def fraction_of_limit(receipt: Receipt) -> Measured | None:
    """Of a step of one token."""
    found = step(1)(receipt)
    return None if found is None else Measured(limit_ms() / found.value)


def peak_bytes(receipt: Receipt) -> Measured:
    """Most memory taken, and what the plan had said, where all that has to be is loaded."""
    results, settings = _results(receipt), receipt.content["settings"]
    for name, expected in PEAK_SETTINGS.items():
        _expect(PEAK, settings[name], expected, name)
    return Measured(results["peak_bytes"], {"planned": results["planned_bytes"]})


def off_plan(receipt: Receipt) -> Measured:
    """How far the plan is from what was taken, as a part of that."""
    peak = peak_bytes(receipt)
    return Measured(abs(peak.limits["planned"] / peak.value - 1))


def small_ops_ms(receipt: Receipt) -> Measured:
    """The traced step less its products with the trellis."""
    whole, trellis = step_parts(receipt.content)
    return Measured(whole - trellis, {"traced_ms": whole, "trellis_ms": trellis})


def kl_ratio(checkpoint: str, latents: str, part: str | None = None) -> Measure:
    """Mean KL from float32 by that of plain torch in BF16; part: of the long text, or its end."""

    def measure(receipt: Receipt) -> Measured | None:
        cases = receipt.content["cases"]
        own = (c for c in cases if (c["checkpoint"], c["latents"]) == (checkpoint, latents))
        case = next(own, None)
        if case is None or (part is not None and part not in case):
            return None
        found = case if part is None else case[part]
        beside = {name: found[name] for name in ("kl", "kl_plain_bf16")}
        return Measured(found["kl"] / found["kl_plain_bf16"], beside)

    return measure


def _results(receipt: Receipt) -> Mapping[str, float]:
    _expect("a receipt of speed", receipt.content["model"]["name"], MODEL, "its model")
    results: Mapping[str, float] = receipt.content["results"]
    return results


def step_parts(timeline: Mapping[str, Any]) -> tuple[float, float]:
    """Milliseconds of the traced step, and of its products with the trellis."""
    kernels = timeline["kernels"]
    own = math.fsum(kernel["own_us"] for kernel in kernels if kernel["name"] in TRELLIS)
    return max(kernel["end_us"] for kernel in kernels) / 1e3, own / 1e3


def missing_launches(timeline: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Kernels of a step that it has too few of -> how many it has, and how many a step has."""
    found = Counter(re.sub(r"_\d+$", "", kernel["name"]) for kernel in timeline["kernels"])
    return {name: (found[name], n) for name, n in LAUNCHES.items() if found[name] < n}


def _expect(where: str, found: object, expected: object, what: str) -> None:
    if found != expected:
        raise SystemExit(f"{where}: {what} is {found!r}, expected {expected!r}")


# -- figures -------------------------------------------------------------------------------------

more = partial(Figure, more_is_better=True)
TOK_S, MS, BYTES, PART, RATIO = "tokens/s", "ms", "bytes", "", "times"
LONGEST = "decode_tok_s.c1.ctx256k"
LONG = {"ctx128k": 0.9, "ctx256k": 0.85}  # of the first context's speed
STEPS = {1: (None, None), 2: (None, None), 4: (15, 12), 8: (24, 20)}
WALLS = {4: (220, 280), 8: (300, 420)}
CHECKPOINTS = ("ember-nano", "ember-nano-base2")
SPEED_FIGURES = (
    more(FIRST, result(FIRST), TOK_S, 120, 150, receipt=SPEED),
    *(
        figure
        for where, bar in LONG.items()
        for key in [f"decode_tok_s.c1.{where}"]
        for figure in (
            more(key, result(key), TOK_S, receipt=SPEED),
            more(f"{key}.relative", relative(key), PART, bar, receipt=SPEED),
        )
    ),
    *(Figure(f"step_ms.m{m}", step(m), MS, *bars, receipt=SPEED) for m, bars in STEPS.items()),
    *(
        more(f"decode_tok_s.c{n}.wall", wall(n), TOK_S, *bars, receipt=SPEED)
        for n, bars in WALLS.items()
    ),
    Figure("limit_ms", limit, MS, receipt=SPEED),
    more("fraction_of_limit.c1", fraction_of_limit, PART, 0.30, 0.38, receipt=SPEED),
    more(f"{LONGEST}.peak", result(LONGEST), TOK_S, receipt=PEAK),
    Figure("peak_bytes.ctx262144.c1", peak_bytes, BYTES, 92e9, receipt=PEAK),
    Figure("peak_bytes.ctx262144.c1.off_plan", off_plan, PART, 0.03, receipt=PEAK),
    Figure("small_ops_ms.c1", small_ops_ms, MS, 2.0, 1.2, receipt=TIMELINE),
)
QUALITY_FIGURES = tuple(
    Figure(f"kl_ratio.{name}.{suffix}", measure, RATIO, bar, receipt=QUALITY)
    for name in CHECKPOINTS
    for suffix, measure, bar in (
        ("bfloat16", kl_ratio(name, "bfloat16"), 1.5),
        ("bfloat16.long", kl_ratio(name, "bfloat16", "long"), None),
        ("bfloat16.last", kl_ratio(name, "bfloat16", "last"), 1.5),
        ("fp8", kl_ratio(name, "fp8"), 3.0),
    )
)
STEP_FIGURES = (*SPEED_FIGURES, *QUALITY_FIGURES)


# -- projection ----------------------------------------------------------------------------------


def step_projection(timeline: Receipt, box: Small) -> dict[str, float]:
    """One token on the box: bytes over its bandwidth, or weights at the rate per multiprocessor and
    clock that this step had, whichever takes longer; and everything else as it was measured."""
    whole, trellis = step_parts(timeline.content)
    rate = TRELLIS_WEIGHTS / (trellis / 1e3 * timeline.multiprocessors * CLOCK_HZ)
    decode = 1e3 * TRELLIS_WEIGHTS / (rate * box.multiprocessors * box.clock_hz)
    found = {
        "weights_per_clock_per_sm": rate,
        "decode_ms": decode,
        "small_ops_ms": whole - trellis,
    }
    for speed in BOX_BYTES_PER_SECOND:
        by_bytes = 1e3 * BYTES_PER_TOKEN / speed
        step_ms, name = max(by_bytes, decode) + whole - trellis, f"gb{speed / 1e9:g}"
        found |= {f"{name}.bytes_ms": by_bytes, f"{name}.step_ms": step_ms}
        found[f"{name}.tok_s"] = 1e3 / step_ms
    return found
