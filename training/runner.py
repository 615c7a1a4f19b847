"""Run micro-batches and optimiser steps: eagerly, or as one CUDA graph per bucket."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from training.context import Context
from training.feed import Item
from training.losses import figure_names, objective
from training.network import TrainingNetwork
from training.optim import Optimiser
from training.recipe import Bucket


class Runner(Protocol):
    """What the training loop drives."""

    optimiser: Optimiser
    dense: Tensor

    def micro(self, item: Item) -> None:
        """Add one micro-batch's gradients, loads and figures."""

    def step(self) -> None:
        """One optimiser step."""

    def take_figures(self) -> dict[str, dict[str, float]]:
        """Means since the last call, by bucket name; waits for the device."""


class _Static:
    """Input buffers and summed figures of one bucket; figures[0] counts batches."""

    def __init__(self, bucket: Bucket, num_figures: int, device: torch.device) -> None:
        shape = (bucket.num_rows, bucket.length)
        self.bucket = bucket
        self.ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.weights = torch.ones(shape, device=device)
        self.pixels: Tensor | None = None
        self.figures = torch.zeros(1 + num_figures, device=device)

    def fill(self, item: Item) -> None:
        ids, weights, pixels = item[1]
        self.ids.copy_(ids, non_blocking=True)
        self.weights.copy_(weights, non_blocking=True)
        if pixels is None:
            return
        if self.pixels is None:
            self.pixels = torch.zeros(pixels.shape, dtype=pixels.dtype, device=self.ids.device)
        self.pixels.copy_(pixels, non_blocking=True)


class EagerRunner:
    """Everything kernel by kernel; any device."""

    def __init__(self, ctx: Context, optimiser: Optimiser, buckets: Sequence[Bucket]) -> None:
        self.network, self.optimiser = TrainingNetwork(ctx), optimiser
        device = optimiser.flat.device
        self.dense = torch.ones((), device=device)
        self.names = figure_names(sum(ctx.text.layer_is_sparse))
        self.static = [_Static(bucket, len(self.names), device) for bucket in buckets]

    def micro(self, item: Item) -> None:
        self.static[item[0]].fill(item)
        self.run(self.static[item[0]])

    def step(self) -> None:
        self.optimiser.step()

    def run(self, static: _Static) -> None:
        """Forward and backward of what the buffers hold."""
        batch = (static.ids, static.weights, static.pixels)
        result = objective(
            self.network, batch, self.dense, static.bucket.chain, self.optimiser.recipe
        )
        result.total.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for prefix, load in result.loads.items():
                self.optimiser.loads[prefix].add_(load)
            static.figures[0] += 1
            static.figures[1:] += result.figures

    def take_figures(self) -> dict[str, dict[str, float]]:
        taken = {}
        for static in self.static:
            count, *sums = static.figures.tolist()
            if count:
                means = [value / count for value in sums]
                taken[static.bucket.name] = dict(zip(self.names, means, strict=True))
            static.figures.zero_()
        return taken


class GraphRunner(EagerRunner):
    """Each bucket and the optimiser step captured once, then replayed."""

    def __init__(
        self,
        ctx: Context,
        optimiser: Optimiser,
        samples: Mapping[int, Item],
        buckets: Sequence[Bucket],
        say: Callable[[str], None],
    ) -> None:
        """`samples`: one real batch per bucket. Afterwards the optimiser is as new."""
        super().__init__(ctx, optimiser, buckets)
        self.pool = torch.cuda.graph_pool_handle()  # shared: graphs never run at once
        self._warm(samples, say)
        self.graphs = [self._capture(partial(self.run, static)) for static in self.static]
        self.step_graph = self._capture(optimiser.step)
        optimiser.reset()
        self.take_figures()
        say(f"captured, {torch.cuda.memory_reserved() / 2**30:.1f} GiB reserved")

    def micro(self, item: Item) -> None:
        self.static[item[0]].fill(item)
        self.graphs[item[0]].replay()

    def step(self) -> None:
        self.step_graph.replay()

    def _warm(self, samples: Mapping[int, Item], say: Callable[[str], None]) -> None:
        """Compile and let libraries allocate, on a side stream as capture asks."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for index, static in enumerate(self.static):
                static.fill(samples[index])
                for _ in range(2):
                    self.run(static)
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() / 2**30
                say(f"warm {static.bucket.name}: {peak:.1f} GiB at most so far")
            self.optimiser.rate.zero_()  # a step that moves nothing
            for _ in range(2):
                self.optimiser.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            function()
        torch.cuda.synchronize()
        return graph
