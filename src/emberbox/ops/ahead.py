"""Which kernels of EXL3 weights are compiled ahead: `emberbox doctor --build` asks.

Every rate that a recipe of ours or a published file uses. What is not here (7 and 8 bits, float16
activations, float32 ones with codebooks other than mul1) is compiled at first use, which takes a
second or two for each kernel.
"""

from collections.abc import Iterator

import torch

from emberbox.formats.trellis import RATES, is_half_rate
from emberbox.ops.build import Source
from emberbox.ops.launch import TYPES, source
from emberbox.ops.linear_exl3.kernel_cuda import CODEBOOKS, SOURCE, gemm_step
from emberbox.ops.moe_experts.decode_cuda import SOURCE as DECODE_SOURCE
from emberbox.ops.moe_experts.prefill_cuda import SOURCE as PREFILL_SOURCE

MAX_WORDS = 96  # 6 bits a weight
BFLOAT16, FLOAT32 = TYPES[torch.bfloat16], TYPES[torch.float32]
ROW_TILES = (1, 2)  # up to 8 rows, up to 16


def kinds(max_words: int = MAX_WORDS) -> Iterator[tuple[int, int]]:
    """(macro RATE: words of a tile over 8, macro CODEBOOK) of what files may hold."""
    for num_words in sorted(RATES):
        for name, number in CODEBOOKS.items():
            if num_words <= max_words and (name == "mul1" or not is_half_rate(num_words)):
                yield num_words // 8, number


def sources(arch: str) -> list[Source]:
    """What `emberbox doctor --build` compiles for an architecture, with bfloat16 activations; with
    float32 ones, products in mul1."""
    in_mul1 = [kind for kind in kinds() if kind[1] == CODEBOOKS["mul1"]]
    pairs = [*((kind, BFLOAT16) for kind in kinds()), *((kind, FLOAT32) for kind in in_mul1)]
    return [
        *(linear(kind, rows, x_type, arch) for kind, x_type in pairs for rows in ROW_TILES),
        *(decode(kind, rows, BFLOAT16) for kind in kinds() for rows in ROW_TILES),
        *(prefill(kind, BFLOAT16, arch) for kind in kinds()),
    ]


def linear(kind: tuple[int, int], row_tiles: int, x_type: int, arch: str) -> Source:
    """Products with one weight, of up to 16 rows or, with one row tile, many. x_type: X_TYPE."""
    macros = {"ROW_TILES": row_tiles, "X_TYPE": x_type, "STEP": gemm_step(arch)}
    return source(SOURCE, {**_kind(kind), **macros})


def decode(kind: tuple[int, int], row_tiles: int, x_type: int, logits: int = 0) -> Source:
    """Experts of a few tokens."""
    macros = {**_kind(kind), "ROW_TILES": row_tiles, "X_TYPE": x_type, "LOGITS": logits}
    return source(DECODE_SOURCE, macros)


def prefill(kind: tuple[int, int], x_type: int, arch: str) -> Source:
    """Experts of many tokens."""
    return source(PREFILL_SOURCE, {**_kind(kind), "X_TYPE": x_type, "STEP": gemm_step(arch)})


def _kind(kind: tuple[int, int]) -> dict[str, int]:
    return {"RATE": kind[0], "CODEBOOK": kind[1]}
