"""SwiGLU and the rotation behind it on a GPU, in one launch."""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.formats import exl3
from emberbox.ops.contract import require
from emberbox.ops.launch import WARPS, Program
from emberbox.ops.linear_exl3.kernel_cuda import X_TYPES

SOURCE = Path(__file__).with_name("swiglu_open.cu")


def swiglu_open(gate_up: Tensor, limit: float, suh: Tensor | None) -> Tensor:
    """gate_up [T, 2 I] float32, float16 or bfloat16 on a CUDA device; see the op's contract.

    Raises OpError for another type, or an I that suh does not fit.
    """
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    require(gate_up.dtype in X_TYPES, "swiglu_open: {}, not one of {}", gate_up.dtype, [*X_TYPES])
    dtype = gate_up.dtype
    if suh is not None:
        dtype = torch.float16
        require(
            suh.dtype is dtype and suh.shape == (width,) and width % exl3.BLOCK == 0,
            "swiglu_open: suh {} {}, expected float16 [{}], of whole blocks of {}",
            suh.dtype,
            list(suh.shape),
            width,
            exl3.BLOCK,
        )
    out = torch.empty(num_rows, width, dtype=dtype, device=gate_up.device)
    tasks = num_rows * -(-width // exl3.BLOCK)
    if tasks:
        program = Program(SOURCE, (("X_TYPE", X_TYPES[gate_up.dtype]),), gate_up.device)
        results = (None, out) if suh is None else (out, None)
        args = (gate_up.contiguous(), suh, *results, num_rows, width, float(limit))
        program.launch("activate", -(-tasks // WARPS), args)
    return out
