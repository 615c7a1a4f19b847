"""Train ember-nano, in pieces that follow each other.

    python -m training.train --out RUN --seconds 460 --total-seconds 890
    python -m training.train --out RUN --seconds 460 --total-seconds 890 --resume
    python -m training.train --out RUN --seconds 120 --total-seconds 120 --resume --repair 0.4

The schedule runs over --total-seconds of training, summed over the pieces of a stage; what a piece
spends on compilation does not count. --repair starts another stage on a finished run, from that
fraction of the peak rate down to zero, on another mixture of buckets and rows; its own later pieces
repeat the option with --resume. Where
only weights were kept of a run, --fresh-optimiser goes on with new moments and warms up again.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from emberbox.model.config import Glm5NextConfig
from training.context import Context
from training.feed import InlineFeed, Item, Make, WorkerFeed
from training.optim import Optimiser
from training.parameters import initial
from training.pointwise import Pointwise
from training.recipe import BUCKETS, RECIPE, REPAIR_BUCKETS, Bucket, Recipe, Schedule
from training.runner import EagerRunner, GraphRunner, Runner
from training.shape import config_json
from training.state import (
    Progress,
    load_optimiser,
    load_progress,
    load_weights,
    save_run,
)

REPORT_SECONDS = 20.0
SYNC_STEPS = 8  # how far the host may run ahead of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One piece of a run. Lengths are in seconds of training, or in steps where those are given."""

    out: Path
    seconds: float = 0.0
    total_seconds: float = 1.0
    steps: int | None = None
    total_steps: int | None = None
    is_resumed: bool = False
    has_fresh_optimiser: bool = False
    repair: float | None = None
    seed: int = 0
    num_workers: int = 10
    buckets: Sequence[Bucket] = BUCKETS
    recipe: Recipe = RECIPE
    device: str = "cuda"

    @property
    def schedule(self) -> Schedule:
        return Schedule() if self.repair is None else Schedule.repair(self.repair)

    def progress(self, now: Progress) -> float:
        """0..1 within the stage."""
        if self.total_steps is not None:
            return now.stage_step / self.total_steps
        return now.stage_seconds / self.total_seconds

    def is_over(self, now: Progress, begun: Progress) -> bool:
        if self.steps is not None and now.step - begun.step >= self.steps:
            return True
        spent = now.stage_seconds - begun.stage_seconds
        return self.progress(now) >= 1.0 or (self.steps is None and spent >= self.seconds)


def train(plan: Plan, config: Glm5NextConfig, make: Make, say: Callable[[str], None]) -> Progress:
    """Run one piece and save it in `plan.out`."""
    progress = _begin(plan)
    number = progress.micro_batches
    is_gpu = plan.device != "cpu"
    feed: InlineFeed | WorkerFeed
    if is_gpu:
        feed = WorkerFeed(make, plan.buckets, plan.seed, number, num_workers=plan.num_workers)
    else:
        feed = InlineFeed(make, plan.buckets, plan.seed, number)
    try:
        start = load_weights(plan.out) if plan.is_resumed else initial(config, plan.seed)
        say(f"{sum(t.numel() for t in start.values()):,} parameters")
        optimiser = Optimiser(start, torch.device(plan.device), plan.recipe)
        runner = _runner(plan, config, optimiser, make, say)
        if plan.is_resumed and progress.stage_step:
            load_optimiser(plan.out, optimiser)
        _loop(plan, runner, feed, progress, say)
    finally:
        feed.close()
    save_run(plan.out, optimiser, progress)
    say(f"saved after {progress.step} steps, {progress.tokens / 1e6:.1f} M tokens")
    return progress


def _begin(plan: Plan) -> Progress:
    if not plan.is_resumed:
        return Progress(seed=plan.seed)
    progress = load_progress(plan.out)
    if progress.seed != plan.seed:
        raise ValueError(f"{plan.out} was begun with seed {progress.seed}, not {plan.seed}")
    stage = 0 if plan.repair is None else max(1, progress.stage)
    if stage < progress.stage:
        raise ValueError(f"{plan.out} is in its repair stage; give --repair to go on")
    if stage > progress.stage:
        progress.next_stage()
    if plan.has_fresh_optimiser:
        progress.stage_step = 0
    return progress


def _runner(
    plan: Plan,
    config: Glm5NextConfig,
    optimiser: Optimiser,
    make: Make,
    say: Callable[[str], None],
) -> Runner:
    if plan.device == "cpu":
        ctx = Context(config, optimiser.params, Pointwise(), torch.float32)
        return EagerRunner(ctx, optimiser, plan.buckets)
    use_tensor_cores()
    ctx = Context(config, optimiser.params, Pointwise.compiled(), torch.bfloat16)
    return GraphRunner(ctx, optimiser, sample_batches(plan.buckets, make), plan.buckets, say)


def use_tensor_cores() -> None:
    """TF32 for float32 products; where that is too coarse, the code turns it off itself."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.set_float32_matmul_precision("high")


def sample_batches(buckets: Sequence[Bucket], make: Make) -> dict[int, Item]:
    """One batch per bucket, for warm-up and measurements; not part of any run."""
    from training.feed import as_tensors

    return {i: (i, as_tensors(make(2**62 + i, b), pin=True)) for i, b in enumerate(buckets)}


def _loop(
    plan: Plan,
    runner: Runner,
    feed: InlineFeed | WorkerFeed,
    progress: Progress,
    say: Callable[[str], None],
) -> None:
    begun = replace(progress)
    start = last = time.monotonic()
    waited = 0.0
    while not plan.is_over(progress, begun):
        fraction = plan.progress(progress)
        runner.optimiser.rate.fill_(plan.schedule.rate(fraction, progress.stage_step))
        runner.dense.fill_(float(plan.schedule.is_dense(fraction)))
        for _ in range(plan.recipe.micro_batches):
            asked = time.monotonic()
            item = feed.next()
            waited += time.monotonic() - asked
            runner.micro(item)
            progress.micro_batches += 1
            progress.tokens += item[1][0].numel()
        runner.step()
        progress.step += 1
        progress.stage_step += 1
        if progress.step % SYNC_STEPS == 0 and plan.device != "cpu":
            torch.cuda.synchronize()
        now = time.monotonic()
        progress.stage_seconds = begun.stage_seconds + now - start
        if now - last > REPORT_SECONDS or plan.is_over(progress, begun):
            last = now
            progress.history.append(_record(runner, progress, begun, waited / (now - start)))
            say(json.dumps(progress.history[-1]))


def _record(runner: Runner, now: Progress, begun: Progress, waited: float) -> dict[str, Any]:
    optimiser = runner.optimiser
    spent = now.stage_seconds - begun.stage_seconds
    figures = runner.take_figures()
    return {
        "stage": now.stage,
        "seconds": round(now.stage_seconds, 1),
        "step": now.step,
        "tokens_per_second": round((now.tokens - begun.tokens) / max(spent, 1e-9)),
        "rate": round(float(optimiser.rate), 4),
        "grad_norm": round(float(optimiser.grad_norm), 4),
        "bad_steps": int(optimiser.num_bad),
        "waited": round(waited, 4),
        "buckets": {
            bucket: {name: round(value, 4) for name, value in row.items()}
            for bucket, row in figures.items()
        },
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> Plan:
    """The command line as a plan."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--seconds", type=float, default=890, help="of this piece")
    parser.add_argument("--total-seconds", type=float, default=890, help="of the whole stage")
    parser.add_argument("--resume", action="store_true", help="go on from --out")
    parser.add_argument("--fresh-optimiser", action="store_true", help="only weights were kept")
    parser.add_argument("--repair", type=float, help="last stage, from this share of the rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=10, help="processes that make data")
    parser.add_argument("--shares", type=float, nargs=len(BUCKETS), help="of the buckets")
    options = parser.parse_args(arguments)
    if options.repair is not None and not options.resume:
        parser.error("--repair needs --resume")
    usual = BUCKETS if options.repair is None else REPAIR_BUCKETS
    shares = options.shares or [bucket.share for bucket in usual]
    return Plan(
        out=options.out,
        seconds=options.seconds,
        total_seconds=options.total_seconds,
        is_resumed=options.resume,
        has_fresh_optimiser=options.fresh_optimiser,
        repair=options.repair,
        seed=options.seed,
        num_workers=options.workers,
        buckets=[replace(b, share=share) for b, share in zip(BUCKETS, shares, strict=True)],
    )


def speaker() -> Callable[[str], None]:
    """Lines with the seconds since now, at once."""
    start = time.monotonic()
    return lambda text: print(f"[{time.monotonic() - start:6.1f}] {text}", flush=True)  # noqa: T201


def main() -> None:
    from training.data import REPAIR, WHOLE, batch_maker

    plan = parse_arguments()
    make = batch_maker(WHOLE if plan.repair is None else REPAIR)
    train(plan, Glm5NextConfig.from_dict(config_json()), make, speaker())


if __name__ == "__main__":
    main()
