"""Launches of moe_prefill.cu: routed experts of many tokens, sorted by expert."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from emberbox.formats import exl3
from emberbox.ops.launch import TYPES, WARPS, Program, arch_of
from emberbox.ops.linear_exl3.kernel_cuda import (
    BLOCK_ROWS,
    GEMM_SHARED,
    ROW_STEP,
    gemm_step,
)
from emberbox.ops.moe_experts.bank import ExpertBank, macros_of
from emberbox.ops.scratch import scratch

SOURCE = Path(__file__).with_name("moe_prefill.cu")
GROUPS = 4  # of 128 channels that a warp rotates, one after another
GATE, UP, DOWN = range(3)


def prefill(x: Tensor, experts: Tensor, weights: Tensor, bank: ExpertBank, limit: float) -> Tensor:
    """x [T, H], experts [T, k] int64, weights [T, k] float32 -> [T, H] in x's dtype."""
    return _Prefill(x, experts, weights, bank, *sort_slots(experts, len(bank))).run(limit)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One call. slot_of and tiles: see sort_slots."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    bank: ExpertBank
    slot_of: Tensor
    tiles: Tensor

    def run(self, limit: float) -> Tensor:
        x, bank, slot_of = self.x, self.bank, self.slot_of
        (hidden, width), rows, top = bank.widths, len(slot_of), self.experts.shape[1]
        rotated = self._halves("moe rotated", 2 * rows * hidden)
        inner = self._halves("moe inner", rows * width)
        size = max(2 * rows * width, self.experts.numel() * hidden)
        floats = scratch("moe floats", size, torch.float32, x.device)
        y = torch.empty_like(x)
        entry_kinds, down_kinds = bank.kinds
        program = self._program(entry_kinds[0])
        program.launch(
            "gather_and_rotate",
            _blocks(rows, hidden),
            (x, bank.matrices, self.experts, slot_of, rotated, rows, top, hidden),
        )
        for kind in entry_kinds:
            self._multiply(GATE, kind, rotated, floats)
            self._multiply(UP, kind, rotated[rows * hidden :], floats[rows * width :])
        program.launch(
            "activate_and_rotate",
            _blocks(rows, width),
            (bank.matrices, self.experts, slot_of, floats, inner, rows, width, float(limit)),
        )
        for kind in down_kinds:
            self._multiply(DOWN, kind, inner, floats)
        tasks = len(x) * (hidden // exl3.BLOCK)
        program.launch("combine", -(-tasks // WARPS), (floats, y, len(x), top, hidden))
        return y

    def _halves(self, purpose: str, size: int) -> Tensor:
        return scratch(purpose, size, torch.float16, self.x.device)

    def _multiply(self, which: int, kind: int, rows: Tensor, out: Tensor) -> None:
        hidden, width = self.bank.widths
        inputs, outputs = (width, hidden) if which == DOWN else (hidden, width)
        weights, sizes = self.weights if which == DOWN else None, (which, inputs, outputs)
        self._program(kind).launch(
            "multiply_tiles",
            len(self.tiles) * (outputs // exl3.BLOCK),
            (self.bank.matrices, self.tiles, rows, self.slot_of, weights, out, *sizes),
            gemm_step(arch_of(self.x.device)) * GEMM_SHARED,
        )

    def _program(self, kind: int) -> Program:
        step = ("STEP", gemm_step(arch_of(self.x.device)))
        macros = (*macros_of(kind), ("X_TYPE", TYPES[self.x.dtype]), step)
        return Program(SOURCE, macros, self.x.device)


def _blocks(rows: int, channels: int) -> int:
    """Of a kernel whose warps rotate GROUPS groups of a row each."""
    tasks = rows * -(-channels // (GROUPS * exl3.BLOCK))
    return -(-tasks // WARPS)


def sort_slots(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """experts [T, k] -> the slot of each row [R] int32, -1 for none, and tiles [M, 3] int32.

    An expert's rows lie together and begin at a multiple of 8. A tile is an expert, its first row
    and the number of rows, at most 128; tiles without rows fill up. R and M depend on shapes alone:
    nothing waits for the GPU.
    """
    flat = experts.flatten()
    device, slots = flat.device, flat.numel()
    in_order, order = flat.sort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + ROW_STEP - 1) // ROW_STEP * ROW_STEP
    first = padded.cumsum(0) - padded
    rank = torch.arange(slots, device=device) - (counts.cumsum(0) - counts)[in_order]
    num_rows = slots + min(slots, num_experts) * (ROW_STEP - 1)
    num_rows = -(-num_rows // ROW_STEP) * ROW_STEP
    slot_of = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    slot_of[first[in_order] + rank] = order.int()
    num_tiles = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    ends = num_tiles.cumsum(0)
    at = torch.arange(slots // BLOCK_ROWS + min(slots, num_experts), device=device)
    expert = torch.searchsorted(ends, at, right=True).clamp_(max=num_experts - 1)
    done = (at - (ends - num_tiles)[expert]) * BLOCK_ROWS
    rows = (counts[expert] - done).clamp_(0, BLOCK_ROWS)
    return slot_of, torch.stack([expert, first[expert] + done, rows], -1).int().contiguous()
