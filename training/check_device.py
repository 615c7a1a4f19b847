"""Is the captured, compiled step on this GPU the plain one, and how fast is it?

    python -m training.check_device --out FOLDER

Per bucket up to 2,048 tokens: loss and gradients of a replayed graph, and of the same computation
run eagerly in BF16, both against eager float32. The graph may be no further off than the eager run,
within a margin. Milliseconds by device events for every bucket. Writes check.json; exits 1 if
anything is off.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberbox.model.config import Glm5NextConfig
from emberbox.ops.numerics import relative_error
from training import sinkhorn
from training.context import Context
from training.data import batch_maker
from training.feed import Item
from training.optim import Optimiser
from training.parameters import initial
from training.pointwise import Pointwise
from training.recipe import BUCKETS, MICRO_TOKENS, RECIPE
from training.runner import EagerRunner, GraphRunner
from training.shape import config_json
from training.train import sample_batches, speaker, use_tensor_cores

REPEATS = 5
MAX_COMPARED_LENGTH = 2048  # an eager step on longer rows does not fit beside the graphs
# Routing and selection flip at near-ties, so BF16 gradients have no tolerance of their own.
MARGIN, SLACK = 1.5, 2e-3
MAX_SINKHORN_ERROR = 1e-5


def milliseconds(function: Callable[[], None]) -> float:
    """Median of REPEATS by device events, after two warm-ups."""
    times: list[float] = []
    for i in range(REPEATS + 2):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(float(start.elapsed_time(stop)))
    return sorted(times)[len(times) // 2]


def measure(runner: EagerRunner, name: str, run: Callable[[], None]) -> tuple[Tensor, float]:
    """Gradients and loss of one micro-batch; leaves the buffers empty."""
    runner.optimiser.reset()
    runner.take_figures()
    run()
    torch.cuda.synchronize()
    gradient = runner.optimiser.grad.clone()
    loss = runner.take_figures()[name]["loss"]
    runner.optimiser.reset()
    return gradient, loss


def compare(
    graph: GraphRunner, plain: EagerRunner, wide: EagerRunner, item: Item
) -> dict[str, float]:
    """Relative errors of graph and eager BF16 against eager float32."""
    name = BUCKETS[item[0]].name
    expected, expected_loss = measure(wide, name, lambda: wide.micro(item))
    report = {"loss": expected_loss}
    for label, runner in (("graph", graph), ("eager", plain)):
        gradient, loss = measure(runner, name, partial(runner.micro, item))
        report[f"{label}_gradient_error"] = relative_error(gradient, expected)
        report[f"{label}_loss_error"] = abs(loss - expected_loss) / expected_loss
    return report


def is_equal(report: dict[str, float]) -> bool:
    """Whether the graph is about as close to float32 as the eager run."""
    return all(
        report[f"graph_{what}_error"] <= MARGIN * report[f"eager_{what}_error"] + SLACK
        for what in ("gradient", "loss")
    )


def sinkhorn_error() -> float:
    """The kernels against the plain form: matrices and gradients."""
    logits = 3 * torch.randn(1003, 4, 4, device="cuda")
    grad = torch.randn_like(logits)
    leaf = logits.clone().requires_grad_()
    out = sinkhorn.sinkhorn(leaf, 20, 1e-6)
    out.backward(grad)  # type: ignore[no-untyped-call]
    wide, sums = sinkhorn.forward(logits.double(), 39, 1e-6)
    expected = sinkhorn.backward(wide, sums, grad.double(), 1e-6)
    if leaf.grad is None:
        return float("inf")
    return max(relative_error(out, wide), relative_error(leaf.grad, expected))


def runners(
    config: Glm5NextConfig,
    optimiser: Optimiser,
    samples: dict[int, Item],
    say: Callable[[str], None],
) -> tuple[GraphRunner, EagerRunner, EagerRunner]:
    """Captured BF16, eager BF16, eager float32, over the same parameters, with selection on."""

    def context(fused: Pointwise, dtype: torch.dtype) -> Context:
        return Context(config, optimiser.params, fused, dtype)

    bf16 = torch.bfloat16
    compiled = context(Pointwise.compiled(), bf16)
    graph = GraphRunner(compiled, optimiser, samples, BUCKETS, say)
    plain = EagerRunner(context(Pointwise(), bf16), optimiser, BUCKETS)
    wide = EagerRunner(context(Pointwise(), torch.float32), optimiser, BUCKETS)
    for runner in (graph, plain, wide):
        runner.dense.zero_()
    return graph, plain, wide


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    folder = parser.parse_args().out
    say = speaker()
    use_tensor_cores()
    config, samples = (
        Glm5NextConfig.from_dict(config_json()),
        sample_batches(BUCKETS, batch_maker()),
    )
    say("data ready")
    report: dict[str, Any] = {"sinkhorn_error": sinkhorn_error()}
    bad = [f"sinkhorn: {report}"] if report["sinkhorn_error"] > MAX_SINKHORN_ERROR else []
    optimiser = Optimiser(initial(config, 0), torch.device("cuda"), RECIPE)
    graph, plain, wide = runners(config, optimiser, samples, say)
    for index, item in samples.items():
        name = BUCKETS[index].name
        row = {"ms": milliseconds(graph.graphs[index].replay)}
        row["tokens_per_second"] = round(MICRO_TOKENS / row["ms"] * 1e3)
        if BUCKETS[index].length <= MAX_COMPARED_LENGTH:
            row |= compare(graph, plain, wide, item)
            bad += [] if is_equal(row) else [name]
        report[name] = row
        say(f"{name}: {row}")
    report["optimiser_ms"] = round(milliseconds(graph.step_graph.replay), 2)
    report["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    say(f"optimiser {report['optimiser_ms']} ms, peak {report['peak_gib']} GiB")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "check.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    say("all equal" if not bad else "DIFFERENT: " + "; ".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
