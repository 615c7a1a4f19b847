"""Time of launches on a GPU by replay of a CUDA graph, and made-up prepared weights for them.

Knows no case: what is timed is a function of the number of the call, so that each call can take
weights and inputs of its own and none finds them in the cache.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast
from unittest.mock import patch

import torch
from torch import Tensor

from emberbox.formats.base import QuantTensor
from emberbox.ops.launch import Program
from emberbox.ops.moe_experts.bank import ExpertBank, bank_of
from emberbox.ops.prepared import PREPARED

DEVICE = torch.device("cuda", 0)
REPEATS = 9
ROTATED_BYTES = 220_000_000  # at least, of weights that calls in turn read: several caches full
Body = Callable[[int], object]
Again = Callable[[], None]


def nothing() -> None:
    """Stands for what need not be done between repeats."""


def replayed(body: Body, calls: int, between: Callable[[], object] = nothing) -> list[float]:
    """Microseconds per call of each repeat: body(0), body(1), ... as one graph. `between` is called
    before each repeat and is not timed. Raises RuntimeError where `body` cannot be captured."""
    for i in range(min(calls, 3)):
        body(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            body(i)
    graph.replay()
    return _repeats(graph.replay, calls, between)


def launched(body: Body, calls: int) -> list[float]:
    """The same without a graph: what the host takes may be the longer part."""

    def run() -> None:
        for i in range(calls):
            body(i)

    run()
    return _repeats(run, calls, nothing)


def _repeats(run: Callable[[], object], calls: int, between: Callable[[], object]) -> list[float]:
    torch.cuda.synchronize()
    found = []
    for _ in range(REPEATS):
        between()
        torch.cuda.synchronize()
        found.append(round(seconds_of(run) * 1e6 / calls, 3))
    return found


def seconds_of(run: Callable[[], object]) -> float:
    """From the GPU's start of what `run` launches to its end."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def random_weight(outputs: int, inputs: int, k: float) -> QuantTensor:
    """Prepared, codebook mul1; values of products have a deviation of about 1."""
    words = round(2 * k)
    parts = {
        "words": torch.randint(
            -(2**31),
            2**31 - 1,
            (outputs // 128, inputs // 16, 32 * words),
            dtype=torch.int32,
            device=DEVICE,
        ),
        "suh": ((torch.rand(inputs, device=DEVICE) + 0.5) * inputs**-0.5).half(),
        "svh": (torch.rand(outputs, device=DEVICE) + 0.5).half(),
        "mul1": torch.ones((), dtype=torch.int32, device=DEVICE),
    }
    return QuantTensor(PREPARED, parts, (outputs, inputs))


def weight_bytes(outputs: int, inputs: int, k: float) -> int:
    """Of a matrix with its scales."""
    return round(outputs * inputs * k / 8) + 2 * (outputs + inputs)


def random_bank(experts: int, hidden: int, width: int, k: float) -> ExpertBank:
    """Experts (gate, up, down)."""
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    bank = bank_of(
        tuple(tuple(random_weight(*shape, k) for shape in shapes) for _ in range(experts))
    )
    if not isinstance(bank, ExpertBank):
        raise SystemExit("prepared experts make no bank: nothing to time")
    return bank


def num_distinct(logits: Tensor, top: int) -> float:
    """Mean over calls of the experts that any token chooses; logits [calls, T, E]."""
    chosen = logits.topk(top, -1).indices.flatten(1)
    taken = torch.zeros(len(logits), logits.shape[-1], device=logits.device)
    return round(float(taken.scatter_(1, chosen, 1.0).sum(1).mean()), 3)


@contextmanager
def recorded() -> Iterator[list[tuple[str, Again]]]:
    """Launches meanwhile: the kernel's name, and what launches it once more."""
    found: list[tuple[str, Again]] = []
    real = cast("Callable[..., None]", Program.launch)

    def launched_too(program: Program, name: str, *rest: object) -> None:
        again = partial(real, program, name, *rest)
        found.append((name, again))
        again()

    with patch.object(Program, "launch", launched_too):
        yield found
