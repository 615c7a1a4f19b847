"""SwiGLU and the rotation behind it on a GPU, in one launch."""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.formats import exl3
from emberbox.ops.contract import expect, require
from emberbox.ops.launch import TYPES, WARPS, Program

SOURCE = Path(__file__).with_name("swiglu_open.cu")


def swiglu_open(gate_up: Tensor, limit: float, suh: Tensor | None) -> Tensor:
    """gate_up [T, 2 I] float32, float16 or bfloat16 on a CUDA device; see the op's contract.

    Raises OpError for another type or an odd width, or an I that suh does not fit.
    """
    (num_rows, both), dtype = gate_up.shape, gate_up.dtype
    require(dtype in TYPES, "swiglu_open: {}, not one of {}", dtype, [*TYPES])
    require(both % 2 == 0, "swiglu_open: {} channels are no gate and up of one width", both)
    width = both // 2
    if suh is not None:
        dtype = torch.float16
        expect("swiglu_open: suh", suh, (width,), dtype)
        require(
            width % exl3.BLOCK == 0,
            "swiglu_open: {} channels to rotate, expected whole blocks of {}",
            width,
            exl3.BLOCK,
        )
    out = torch.empty(num_rows, width, dtype=dtype, device=gate_up.device)
    tasks = num_rows * -(-width // exl3.BLOCK)
    if tasks:
        program = Program(SOURCE, (("X_TYPE", TYPES[gate_up.dtype]),), gate_up.device)
        results = (None, out) if suh is None else (out, None)
        args = (gate_up.contiguous(), suh, *results, num_rows, width, float(limit))
        program.launch("activate", -(-tasks // WARPS), args)
    return out
