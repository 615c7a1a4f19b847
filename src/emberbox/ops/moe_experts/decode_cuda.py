"""Launches of moe_decode.cu: routed experts of a few tokens."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from emberbox.formats import exl3
from emberbox.ops.contract import require
from emberbox.ops.launch import TYPES, WARPS, Program, num_multiprocessors
from emberbox.ops.linear_exl3.kernel_cuda import ROW_STEP
from emberbox.ops.moe_experts.bank import ExpertBank, macros_of
from emberbox.ops.scratch import counters, scratch

SOURCE = Path(__file__).with_name("moe_decode.cu")
MAX_TOKENS = 16
MAX_SLOTS = 256
MAX_EXPERTS = 512  # that are chosen from logits
NUM_RUNS = 2 + 3 * MAX_SLOTS  # of struct Runs
SORT_BLOCKS_PER_MULTIPROCESSOR = 4


@dataclass(frozen=True, slots=True)
class Chosen:
    """experts [T, k] int64, weights [T, k] float32."""

    experts: Tensor
    weights: Tensor

    @property
    def top(self) -> int:
        """Experts of a token."""
        return self.experts.shape[1]


@dataclass(frozen=True, slots=True)
class Logits:
    """What experts are chosen from in the first launch: the top largest of sigmoid(logits) + bias,
    weighted by sigmoid(logits), normalised, times scaling. logits [T, E], bias [E], float32."""

    logits: Tensor
    bias: Tensor
    top: int
    scaling: float


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Working memory of one call."""

    rotated: Tensor
    runs: Tensor
    weights: Tensor
    inner: Tensor
    floats: Tensor
    arrived: Tensor

    @classmethod
    def of(cls, slots: int, hidden: int, width: int, device: torch.device) -> "_Pieces":
        floats = max(2 * width, hidden)
        return cls(
            scratch("moe rotated", 2 * slots * hidden, torch.float16, device),
            scratch("moe runs", NUM_RUNS, torch.int32, device),
            scratch("moe weights", MAX_SLOTS, torch.float32, device),
            scratch("moe inner", slots * width, torch.float16, device),
            scratch("moe floats", slots * floats, torch.float32, device),
            counters(slots * max(width, hidden) // exl3.BLOCK, device),
        )


def decode(
    x: Tensor, bank: ExpertBank, limit: float, routing: Chosen | Logits, out: Tensor | None = None
) -> Tensor:
    """x [T, H] -> [T, H] in x's dtype, in `out` if there is one. Raises OpError for more tokens or
    slots than it takes. Experts of a token are distinct and of the bank: that is not looked at.
    """
    require(
        len(x) <= MAX_TOKENS and len(x) * routing.top <= MAX_SLOTS,
        "moe_experts: {} tokens of {} experts, at most {} and {} together",
        len(x),
        routing.top,
        MAX_TOKENS,
        MAX_SLOTS,
    )
    y = torch.empty_like(x) if out is None else out
    if not len(x):
        return y
    hidden, width = bank.widths
    slots = len(x) * routing.top
    pieces = _Pieces.of(slots, hidden, width, x.device)
    entry_kinds, down_kinds = bank.kinds
    for kind in (*entry_kinds, *down_kinds):
        _program(x, kind, routing).load("sort_and_rotate", "gate_up", "down")
    _sort_and_rotate(_program(x, entry_kinds[0], routing), x, bank, routing, pieces)
    runs = min(slots, len(bank))
    matrices, floats, arrived = bank.matrices, pieces.floats, pieces.arrived
    sizes, down_sizes = (slots, hidden, width, float(limit)), (routing.top, hidden, width)
    for kind in entry_kinds:
        _program(x, kind, routing).launch(
            "gate_up",
            2 * runs * (width // exl3.BLOCK),
            (matrices, pieces.rotated, pieces.runs, floats, arrived, pieces.inner, *sizes),
        )
    for kind in down_kinds:
        _program(x, kind, routing).launch(
            "down",
            runs * (hidden // exl3.BLOCK),
            (matrices, pieces.inner, pieces.runs, pieces.weights, floats, arrived, y, *down_sizes),
        )
    return y


def _sort_and_rotate(
    program: Program, x: Tensor, bank: ExpertBank, routing: Chosen | Logits, pieces: _Pieces
) -> None:
    hidden, _ = bank.widths
    scaling = 1.0
    inputs: tuple[Tensor | None, ...]
    if isinstance(routing, Chosen):
        inputs = (routing.experts, routing.weights, None, None)
    else:
        inputs = (None, None, routing.logits, routing.bias)
        scaling = float(routing.scaling)
    tasks = 2 * len(x) * routing.top * (hidden // exl3.BLOCK)
    sizes = (len(x), routing.top, hidden, len(bank))
    most = SORT_BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors(x.device)
    program.launch(
        "sort_and_rotate",
        min(-(-tasks // WARPS), most),
        (x, *inputs, bank.matrices, pieces.rotated, pieces.runs, pieces.weights, *sizes, scaling),
    )


def _program(x: Tensor, kind: int, routing: Chosen | Logits) -> Program:
    macros = (
        *macros_of(kind),
        ("ROW_TILES", 1 if len(x) <= ROW_STEP else 2),
        ("X_TYPE", TYPES[x.dtype]),
        ("LOGITS", int(isinstance(routing, Logits))),
    )
    return Program(SOURCE, macros, x.device)
