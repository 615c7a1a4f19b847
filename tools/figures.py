"""Figures of receipts/h200/summary.json: how each follows from a receipt, its limits and its bar.

A figure is the median of the repeats of a case, of several cases the worst. Limits follow from
bytes, and from instructions that were counted in the cubin. What is said of a GB10 is a projection.
A new key is a line of FIGURES, with a measure of its own where it is of another kind.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

BYTES_PER_SECOND = 4.29e12  # read and written by a copy on an H200, which bars are held against
CLOCK_HZ = 1.98e9
LANES = 128  # instructions of single lanes that a multiprocessor issues per clock
SLOTS = {"integer": 64, "multiply": 64, "half": 128, "shuffle": 32}  # of these, per clock
WEIGHTS_PER_FLOP = 0.5
Case = Mapping[str, Any]


@dataclass(frozen=True)
class Small:
    """A box that nothing here has run on: its figures are from its data sheet."""

    name: str = "gb10"
    arch: str = "sm_121"
    multiprocessors: int = 48
    clock_hz: float = 2.4e9
    bytes_per_second: float = 273e9
    latency_seconds: float = 0.8e-6
    shared_bytes: int = 100 << 10
    registers: int = 65536
    max_warps: int = 48


@dataclass(frozen=True)
class Receipt:
    """One receipt as it lies there."""

    content: Mapping[str, Any]

    def cases(self, **wanted: object) -> list[Case]:
        """Those with these values; of a tuple every one must be there. Raises SystemExit."""
        found = [case for case in self.content["cases"] if _fits(case, wanted)]
        several = {key: values for key, values in wanted.items() if isinstance(values, tuple)}
        for key, values in several.items():
            if missing := set(values) - {case[key] for case in found}:
                raise SystemExit(f"no case of {wanted} with {key} {sorted(missing)}")
        if not found:
            raise SystemExit(f"no case of {wanted}")
        return found

    def code(self, kernel: str, k: float, arch: str = "sm_90") -> Case | None:
        """What a cubin says; None where it was not read."""
        wanted = {"kernel": kernel, "k": k, "arch": arch}
        return next((each for each in self.content["code"] if _fits(each, wanted)), None)

    @property
    def multiprocessors(self) -> int:
        count: int = self.content["device"]["num_multiprocessors"]
        return count


@dataclass(frozen=True)
class Measured:
    """A value, and limits in the same unit by their name."""

    value: float
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A key of the summary: where it comes from, and what it should be.

    measure: None where the receipt has no such run.
    """

    key: str
    measure: Callable[[Receipt], Measured | None]
    unit: str
    bar: float | None = None
    aim: float | None = None
    more_is_better: bool = False
    receipt: str = "kernels.json"

    def holds(self, value: float) -> bool:
        """Whether the bar does; one that does not exist always."""
        if self.bar is None:
            return True
        return value >= self.bar if self.more_is_better else value <= self.bar


def _fits(case: Case, wanted: Mapping[str, object]) -> bool:
    return all(
        case.get(key) in value if isinstance(value, tuple) else case.get(key) == value
        for key, value in wanted.items()
    )


# -- measures ------------------------------------------------------------------------------------


def experts_us(k: float, tokens: int) -> Callable[[Receipt], Measured]:
    """The whole routed step of a few tokens."""

    def measure(receipt: Receipt) -> Measured:
        (case,) = receipt.cases(op="moe_decode", k=k, tokens=tokens)
        distinct = statistics.fmean(case["distinct"])
        limits = {"bytes_limit": distinct * case["expert_bytes"] / BYTES_PER_SECOND * 1e6}
        if (speed := issue_weights_per_second(receipt, "gate_up", k)) is not None:
            limits["decode_limit"] = distinct * _expert_weights(case) / speed * 1e6
        return Measured(statistics.median(case["us"]), limits)

    return measure


def experts_us_each(k: float, tokens: int) -> Callable[[Receipt], Measured]:
    """The same by the number of distinct experts of each repeat."""

    def measure(receipt: Receipt) -> Measured:
        (case,) = receipt.cases(op="moe_decode", k=k, tokens=tokens)
        each = [us / count for us, count in zip(case["us"], case["distinct"], strict=True)]
        whole = experts_us(k, tokens)(receipt).limits
        distinct = statistics.fmean(case["distinct"])
        return Measured(statistics.median(each), {n: v / distinct for n, v in whole.items()})

    return measure


def distinct_experts(k: float, tokens: int) -> Callable[[Receipt], Measured]:
    """Mean over calls of what a step of these tokens needs."""

    def measure(receipt: Receipt) -> Measured:
        (case,) = receipt.cases(op="moe_decode", k=k, tokens=tokens)
        return Measured(statistics.fmean(case["distinct"]))

    return measure


def weights_per_clock(k: float, tokens: tuple[int, ...]) -> Callable[[Receipt], Measured]:
    """Of gate and up and of down, each timed alone, over the sum of their times; the slowest."""

    def measure(receipt: Receipt) -> Measured:
        per_clock = receipt.multiprocessors * CLOCK_HZ
        speeds = []
        for count in tokens:
            cases = [
                receipt.cases(op="expert_kernel", k=k, tokens=count, kernel=kernel)[0]
                for kernel in ("gate_up", "down")
            ]
            parts = [statistics.fmean(case["distinct"]) * _expert_weights(case) for case in cases]
            weights = parts[0] * 2 / 3 + parts[1] / 3
            seconds = sum(statistics.median(case["us"]) for case in cases) / 1e6
            speeds.append(weights / seconds / per_clock)
        limits = {"bytes_limit": BYTES_PER_SECOND * 8 / k / per_clock}
        if (speed := issue_weights_per_second(receipt, "gate_up", k)) is not None:
            limits["decode_limit"] = speed / per_clock
        return Measured(min(speeds), limits)

    return measure


def linear_us(
    inputs: int, outputs: int, k: float, rows: tuple[int, ...]
) -> Callable[[Receipt], Measured]:
    """A linear layer, the slowest of these numbers of rows."""

    def measure(receipt: Receipt) -> Measured:
        cases = receipt.cases(op="linear", k=k, shape=[inputs, outputs], rows=rows)
        limits = {"bytes_limit": cases[0]["weight_bytes"] / BYTES_PER_SECOND * 1e6}
        if (speed := issue_weights_per_second(receipt, "multiply_rows", k)) is not None:
            limits["decode_limit"] = inputs * outputs / speed * 1e6
        return Measured(max(statistics.median(case["us"]) for case in cases), limits)

    return measure


def prefill_tflops(k: float, tokens: int) -> Callable[[Receipt], Measured]:
    """Routed experts of many tokens: two operations per weight and routed row, decode included."""

    def measure(receipt: Receipt) -> Measured:
        (case,) = receipt.cases(op="moe_prefill", k=k, tokens=tokens)
        work = _expert_weights(case) * tokens * case["top"] / WEIGHTS_PER_FLOP
        tera = work / 1e12
        seconds = statistics.median(case["us"] or case["eager_us"]) / 1e6
        read = case["distinct"] * case["expert_bytes"] / BYTES_PER_SECOND
        dense = receipt.content["dense_flop_per_second"] / 1e12
        return Measured(tera / seconds, {"bytes_limit": tera / read, "dense_limit": dense})

    return measure


def issue_weights_per_second(receipt: Receipt, kernel: str, k: float) -> float | None:
    """If every multiprocessor issued instructions of the loop in every slot. None: not counted."""
    code = receipt.code(kernel, k)
    if code is None:
        return None
    per_clock = LANES / instructions_per_weight(code)
    return receipt.multiprocessors * CLOCK_HZ * per_clock


def instructions_per_weight(code: Case) -> float:
    """Of one lane; its lanes together make the loop's instructions."""
    return float(code["loop_instructions"] / code["loop_weights_per_lane"])


def _expert_weights(case: Case) -> int:
    hidden, width = case["shape"]
    return int(3 * hidden * width)


# -- figures -------------------------------------------------------------------------------------

more = partial(Figure, more_is_better=True)
FEW = (1, 2, 4, 8)
US, TFLOPS, PER_CLOCK = "us", "TFLOP/s", "weights"
FIGURES = (
    Figure("moe_decode_us.k2.tokens1", experts_us(2, 1), US, 65, 50),
    *(Figure(f"moe_decode_us.k2.tokens{n}", experts_us(2, n), US) for n in (2, 4)),
    Figure("moe_decode_us.k2.tokens8", experts_us(2, 8), US, 310, 260),
    Figure("moe_decode_us.k2.tokens8.per_expert", experts_us_each(2, 8), US, 7.3),
    Figure("moe_decode_us.k2.tokens8.experts", distinct_experts(2, 8), "experts"),
    Figure("moe_decode_us.k2.tokens16", experts_us(2, 16), US),
    Figure("moe_decode_us.k3.tokens1", experts_us(3, 1), US, 75, 60),
    *(
        Figure(f"moe_decode_us.k{k:g}.tokens{n}", experts_us(k, n), US)
        for k, counts in ((2.5, (1, 8)), (3, (8,)), (4, (1, 8)))
        for n in counts
    ),
    Figure("weights_per_clock_per_sm.k2", weights_per_clock(2, (1, 8)), PER_CLOCK, 13, 17, True),
    *(
        more(f"weights_per_clock_per_sm.k{k:g}", weights_per_clock(k, (1, 8)), PER_CLOCK)
        for k in (2.5, 3, 4)
    ),
    Figure("linear_us.4096x24576.k4.rows1..8", linear_us(4096, 24576, 4, FEW), US, 40, 34),
    Figure("linear_us.8192x4096.k4.rows1..8", linear_us(8192, 4096, 4, FEW), US, 17, 14),
    Figure("linear_us.16384x4096.k4.rows1..8", linear_us(16384, 4096, 4, FEW), US, 29, 24),
    Figure("linear_us.4096x24576.k2.rows1..8", linear_us(4096, 24576, 2, FEW), US),
    Figure("linear_us.4096x2048.k4.rows1..8", linear_us(4096, 2048, 4, FEW), US),
    Figure("linear_us.1536x16384.k4.rows1..8", linear_us(1536, 16384, 4, FEW), US),
    Figure("linear_us.4096x154880.k6.rows1..8", linear_us(4096, 154880, 6, FEW), US),
    Figure("moe_prefill_tflops.k2.tokens4096", prefill_tflops(2, 4096), TFLOPS, 200, 400, True),
    *(
        more(f"moe_prefill_tflops.k2.tokens{n}", prefill_tflops(2, n), TFLOPS)
        for n in (256, 1024, 8192)
    ),
)


# -- projection ----------------------------------------------------------------------------------


def projection(receipt: Receipt, box: Small, k: float) -> dict[str, float]:
    """What the kernel of gate and up would do on the box, from its cubin for that architecture and
    the rate per clock that was measured elsewhere. Empty where no cubin was read."""
    code = receipt.code("gate_up", k, box.arch)
    if code is None:
        return {}
    blocks = min(
        box.registers // (-(-code["registers"] // 8) * 8 * 256),
        box.shared_bytes // code["shared_bytes"],
        box.max_warps // 8,
    )
    measured = weights_per_clock(k, (1,))(receipt).value
    reached = measured * box.multiprocessors * box.clock_hz
    by_bytes = box.bytes_per_second * 8 / k
    (case,) = receipt.cases(op="moe_decode", k=k, tokens=1)
    weights = _expert_weights(case) * case["top"]
    return {
        "registers": code["registers"],
        "local_bytes": code["local_bytes"],
        "resident_blocks_per_sm": blocks,
        "bytes_in_flight_per_sm": blocks * 8 * 32 * code["streamed_bytes_per_lane"],
        "bytes_in_flight_per_sm.needed": box.bytes_per_second
        * box.latency_seconds
        / box.multiprocessors,
        "weights_per_clock_per_sm": measured,
        "weights_per_clock_per_sm.needed": by_bytes / box.multiprocessors / box.clock_hz,
        "weights_per_clock_per_sm.issue_limit": LANES / instructions_per_weight(code),
        "moe_decode_us.tokens1": weights / min(reached, by_bytes) * 1e6,
    }
