"""Where the time of one decode step of the full-size model goes: its kernels on a GPU, one by one.

    python -m benchmarks.step_timeline --out receipts/h200/step_timeline.json [--png FILE]

The synthetic model of `emberbox.testing.synthetic` decodes one sequence with 1,024 tokens behind
it, by a runner of sequences of up to 262,144, so that the launches are those of speed.json. The
step is timed without a profiler, by events around replays of its CUDA graph, and then traced by
torch's profiler. Kernels that multiply with the trellis are told from the others by name.
A kernel starts before the one before it has ended, and waits: of its time only what comes after
that end is its own, so that the sum over kernels, and the gaps, is the step.
"""

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from benchmarks.machine import ROOT, about_run, write
from emberbox.engine.decode_runner import DecodeRunner
from emberbox.engine.plan import Work
from emberbox.measure.receipt import seal_of
from emberbox.model.cache import CacheSize
from emberbox.model.config import PAGE_TOKENS
from emberbox.settings import EngineSettings

TRELLIS = ("multiply_rows", "multiply_side_by_side", "multiply_gate_up", "gate_up", "down")
CONTEXT, REPEATS, TRACED = 1_024, 50, 5
MAX_MODEL_LEN = 262_144  # as in speed.json: a narrow page table needs no scores of pools
MODEL = "glm-5.3-flash-base2-published"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "receipts/h200/step_timeline.json")
    parser.add_argument("--png", type=Path, help="draw one step")
    parser.add_argument("--context", type=int, default=CONTEXT)
    options = parser.parse_args()
    from emberbox.testing.synthetic import synthetic_network

    start = time.monotonic()
    settings = EngineSettings(device="cuda", max_running=1, snapshot_bytes=0)
    network = synthetic_network(MODEL, settings, seed=0).network
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    print(f"made in {seconds:.1f} s", flush=True)
    with torch.inference_mode():
        found = measured(network, options.context)
    facts = {
        "benchmark": "step_timeline",
        **about_run("cuda"),
        "model": MODEL,
        "made_seconds": seconds,
        "context": options.context,
        "max_model_len": MAX_MODEL_LEN,
    }
    write({**facts, **found}, options.out, indent=None)
    if options.png:
        draw(found["kernels"], options.png)


def measured(network: Any, context: int) -> dict[str, Any]:  # noqa: ANN401
    """Median time of a step, and the kernels of one."""
    runner, work = runner_of(network, context)
    for _ in range(3):
        runner.run([work])
    graph = runner.graph_of(1, 1)
    times = [timed(graph) for _ in range(REPEATS)]
    kernels = traced(graph)
    trellis = sum(k["own_us"] for k in kernels if k["name"] in TRELLIS)
    traced_us = max(kernel["end_us"] for kernel in kernels)
    results = {
        "step_ms": statistics.median(times),
        "traced_ms": traced_us / 1e3,
        "trellis_ms": trellis / 1e3,
        "small_ops_ms": traced_us / 1e3 - trellis / 1e3,  # of one timeline
        "num_kernels": len(kernels),
    }
    raw = {"step_ms": times, "kernels": kernels}
    return {"results": results, "raw_sha256": seal_of(raw), "by_kernel": summed(kernels), **raw}


def runner_of(network: Any, context: int) -> tuple[DecodeRunner, Work]:  # noqa: ANN401
    """Steps as long sequences need them, with a cache for one of so many tokens; one step of it."""
    num_pages = -(-(context + PAGE_TOKENS) // PAGE_TOKENS)
    cache = network.new_cache(CacheSize(num_pages, 1))
    runner = DecodeRunner(network, cache, max_running=1, max_model_len=MAX_MODEL_LEN)
    return runner, Work(0, (5,), context, 0, tuple(range(num_pages)), 0, samples=True)


def timed(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of one replay."""
    timing: Any = torch.cuda.Event
    start, end = timing(enable_timing=True), timing(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def traced(graph: torch.cuda.CUDAGraph) -> list[dict[str, Any]]:
    """Kernels of the last of several replays, in order: name, end and own microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(TRACED):
            graph.replay()
            torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    last = events[-(len(events) // TRACED) :]
    first = last[0].time_range.start
    kernels, ended = [], 0.0
    for event in last:
        at, us = event.time_range.start - first, event.time_range.elapsed_us()
        own = max(0.0, at + us - max(at, ended))
        ended = max(ended, at + us)
        kernel = {"name": short(event.name), "end_us": round(at + us, 2), "own_us": round(own, 2)}
        kernels.append(kernel)
    return kernels


def short(name: str) -> str:
    """A kernel's name without its types."""
    return name.split("(")[0].split("<")[0].split("::")[-1].removeprefix("void ")[:60]


def summed(kernels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By name, the largest sum first."""
    groups = defaultdict(list)
    for kernel in kernels:
        groups[kernel["name"]].append(kernel["own_us"])
    rows = [
        {
            "name": name,
            "count": len(us),
            "us": round(math.fsum(us), 1),  # `sum` depends on the version of Python
            "median_us": statistics.median(us),
        }
        for name, us in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def draw(kernels: Sequence[dict[str, Any]], path: Path) -> None:
    """One step as bars over time: products with the trellis above, everything else below."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(14, 2.4), dpi=110)
    for row, (label, colour) in enumerate((("other", "#888888"), ("trellis", "#d05020"))):
        own = [k for k in kernels if (k["name"] in TRELLIS) == (label == "trellis")]
        bars = [((k["end_us"] - k["own_us"]) / 1e3, k["own_us"] / 1e3) for k in own]
        axes.broken_barh(bars, (row, 0.8), facecolors=colour, label=label)
    axes.set_yticks([0.4, 1.4], ["other", "trellis"])
    axes.set_xlabel("milliseconds")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
