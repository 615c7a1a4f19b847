"""All layers, sequences and heads in one launch."""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.ops.contract import expect, require
from emberbox.ops.kda_decode.kernel_cuda import TAPS, D
from emberbox.ops.launch import STEP_TYPES, Program

SOURCE = Path(__file__).with_name("kda_apply.cu")
BLOCKS_PER_HEAD = 2


def kda_apply(
    states: Tensor,
    history: Tensor,
    pending: tuple[Tensor, Tensor, Tensor, Tensor],
    slots: Tensor,
    accepted: Tensor,
) -> None:
    """All on one CUDA device; history float32 or bfloat16. Raises OpError for other shapes."""
    conv, L, B = pending[0], len(states), len(slots)
    N, H, T = states.shape[1], states.shape[2], conv.shape[1]
    require(
        history.dtype in STEP_TYPES,
        "kda_apply: history is {}, expected {}",
        history.dtype,
        list(STEP_TYPES),
    )
    require(0 < B <= T and T % B == 0, "kda_apply: {} rows for {} sequences", T, B)
    expect("kda_apply: states", states, (L, N, H, D, D), torch.float32)
    expect("kda_apply: history", history, (L, N, TAPS - 1, 3 * H * D), history.dtype)
    expect("kda_apply: pending inputs", conv, (L, T, 3 * H * D), history.dtype)
    for name, each in zip(("k", "gate", "deltas"), pending[1:], strict=True):
        expect(f"kda_apply: pending {name}", each, (L, T, H, D), torch.float32)
    for name, each in (("slots", slots), ("accepted", accepted)):
        expect(f"kda_apply: {name}", each, (B,), torch.int32)
    program = Program(SOURCE, (("X_TYPE", STEP_TYPES[history.dtype]),), states.device)
    program.launch(
        "kda_apply",
        L * B * H * BLOCKS_PER_HEAD,
        (states, history, *pending, slots, accepted, B, T // B, H, N),
    )
