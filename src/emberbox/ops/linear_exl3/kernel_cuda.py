"""EXL3 products on a GPU: rows are rotated, multiplied with the trellis as it is, rotated back.

Up to 16 rows decode a tile for each product and keep nothing. More rows share tiles that a block
decodes once. Values of the trellis are bit-exact in both; the rotated rows are rounded to fp16.
"""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.ops.contract import require
from emberbox.ops.launch import TYPES, WARPS, Program, arch_of, num_multiprocessors
from emberbox.ops.prepared import LANES, prepared
from emberbox.ops.scratch import counters, scratch

SOURCE = Path(__file__).with_name("linear_exl3.cu")
MAX_ROWS = 16
ROW_STEP = 8  # rows of one tensor instruction
BLOCK_ROWS = 128
GEMM_SHARED = 24 << 10  # bytes for each k-tile of a stage
WIDE_ARCHS = ("sm_90", "sm_100", "sm_103")  # with memory for two blocks of four k-tiles
BLOCKS_PER_MULTIPROCESSOR = 2
CODEBOOKS = {"3inst": 0, "mcg": 1, "mul1": 2}


def linear_exl3(x: Tensor, weight: QuantTensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] float32, float16 or bfloat16 on a CUDA device -> [..., N] in x's dtype.

    Raises OpError for another type, another width, a weight that is elsewhere or another's bias.
    """
    outputs, inputs = weight.shape
    require(x.dtype in TYPES, "linear_exl3: x is {}, expected one of {}", x.dtype, list(TYPES))
    require(
        x.shape[-1] == inputs,
        "linear_exl3: x has {} channels, the weight {}",
        x.shape[-1],
        inputs,
    )
    require(
        weight.device == x.device, "linear_exl3: x on {}, the weight on {}", x.device, weight.device
    )
    require(
        bias is None or bias.shape == (outputs,),
        "linear_exl3: a bias of other outputs than the weight's {}",
        outputs,
    )
    rows = x.reshape(-1, inputs).contiguous()
    y = torch.empty(len(rows), outputs, dtype=x.dtype, device=x.device)
    if len(rows):
        multiply = _few if len(rows) <= MAX_ROWS else _many
        multiply(rows, prepared(weight), None if bias is None else bias.float().contiguous(), y)
    return y.reshape(*x.shape[:-1], outputs)


def codebook_number(weight: QuantTensor) -> int:
    """As trellis.cuh counts them."""
    named = [marker for marker in exl3.MARKERS if marker in weight.parts]
    return CODEBOOKS[named[0] if named else "3inst"]


def gemm_step(arch: str) -> int:
    """k-tiles of a stage of the kernels for many rows."""
    return 4 if arch in WIDE_ARCHS else 2


def num_blocks(input_groups: int, output_groups: int, device: torch.device) -> int:
    """Of `multiply_units`, as many as run at once; somewhat fewer, if then each has one piece of
    one output group."""
    most = BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors(device)
    whole = output_groups * max(1, min(most // output_groups, input_groups))
    if whole <= most and 10 * whole >= 9 * most:
        return whole
    return min(most, output_groups * input_groups)


def _few(x: Tensor, weight: QuantTensor, bias: Tensor | None, y: Tensor) -> None:
    words, suh, svh = (weight.parts[name] for name in ("words", "suh", "svh"))
    num_rows, inputs, outputs = len(x), len(suh), len(svh)
    program = _program(x, weight, row_tiles=1 if num_rows <= ROW_STEP else 2)
    rotated = scratch("rotated", num_rows * inputs, torch.float16, x.device)
    tasks = num_rows * (inputs // exl3.BLOCK)
    program.launch(
        "rotate", -(-tasks // WARPS), (x, suh, rotated, num_rows, weight.shape[1], inputs)
    )
    output_groups = outputs // exl3.BLOCK
    blocks = num_blocks(inputs // exl3.BLOCK, output_groups, x.device)
    partial = scratch("partial", 2 * blocks * num_rows * exl3.BLOCK, torch.float32, x.device)
    arrived = counters(output_groups * num_rows, x.device)
    sizes = (num_rows, inputs, outputs, weight.shape[0])
    program.launch(
        "multiply_rows", blocks, (words, rotated, svh, bias, y, partial, arrived, *sizes)
    )


def _many(x: Tensor, weight: QuantTensor, bias: Tensor | None, y: Tensor) -> None:
    words, suh, svh = (weight.parts[name] for name in ("words", "suh", "svh"))
    num_rows, inputs, outputs = len(x), len(suh), len(svh)
    program = _program(x, weight)
    padded = -(-num_rows // ROW_STEP) * ROW_STEP
    rotated = scratch("rotated", padded * inputs, torch.float16, x.device)
    program.launch(
        "rotate_by_eight",
        -(-padded * (inputs // exl3.BLOCK) // WARPS),
        (x, suh, rotated, num_rows, weight.shape[1], inputs),
    )
    program.launch(
        "multiply_many",
        -(-num_rows // BLOCK_ROWS) * (outputs // exl3.BLOCK),
        (words, rotated, svh, bias, y, num_rows, inputs, outputs, weight.shape[0]),
        gemm_step(arch_of(x.device)) * GEMM_SHARED,
    )


def _program(x: Tensor, weight: QuantTensor, row_tiles: int = 1) -> Program:
    macros = {
        "RATE": weight.parts["words"].shape[-1] // LANES,
        "CODEBOOK": codebook_number(weight),
        "ROW_TILES": row_tiles,
        "STEP": gemm_step(arch_of(x.device)),
        "X_TYPE": TYPES[x.dtype],
    }
    return Program(SOURCE, tuple(macros.items()), x.device)
