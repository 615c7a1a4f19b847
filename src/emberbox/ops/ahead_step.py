"""Which kernels of a decode step are compiled ahead, beside those of ahead.py.

With bfloat16 activations, for EXL3 weights in the kinds that files hold, and for latent attention
in the shapes of the released model and of ember-nano. Others are compiled at first use.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import torch

from emberbox.ops.ahead import BFLOAT16, FLOAT32, ROW_TILES, decode, kinds
from emberbox.ops.build import Source
from emberbox.ops.greedy_rows.kernel_cuda import SOURCE as GREEDY_ROWS
from emberbox.ops.hyper_close.kernel_cuda import SOURCE as HYPER_CLOSE
from emberbox.ops.hyper_open.kernel_cuda import SOURCE as HYPER_OPEN
from emberbox.ops.index_choose.kernel_cuda import SOURCE as INDEX_CHOOSE
from emberbox.ops.kda_apply.kernel_cuda import SOURCE as KDA_APPLY
from emberbox.ops.kda_decode.kernel_cuda import SOURCE as KDA_DECODE
from emberbox.ops.launch import TYPES, source
from emberbox.ops.linear_exl3.kernel_cuda import CODEBOOKS
from emberbox.ops.mla_decode.kernel_cuda import ATTEND, PRODUCTS
from emberbox.ops.mla_open.kernel_cuda import SOURCE as MLA_OPEN
from emberbox.ops.rotated_linear.kernel_cuda import SOURCE as ROTATED_LINEAR
from emberbox.ops.rotated_swiglu.kernel_cuda import SOURCE as ROTATED_SWIGLU
from emberbox.ops.sample_rows.kernel_cuda import SOURCE as SAMPLE_ROWS
from emberbox.ops.small_linear.kernel_cuda import SOURCE as SMALL_LINEAR
from emberbox.ops.swiglu_open.kernel_cuda import SOURCE as SWIGLU_OPEN

FLOAT16 = TYPES[torch.float16]  # of kv_b beside weights in EXL3
# Latent attention of the released model and of ember-nano.
SHAPES = (
    {"HEADS": 64, "KEY": 256, "VALUE": 256, "LATENT": 512},
    {"HEADS": 4, "KEY": 64, "VALUE": 64, "LATENT": 128},
)
# Values of the macros; all their combinations are compiled.
PLAIN: tuple[tuple[Path, Mapping[str, tuple[int, ...]]], ...] = (
    (
        HYPER_OPEN,
        {"X_TYPE": (BFLOAT16,), "FN_TYPE": (BFLOAT16, FLOAT32), "NORM_TYPE": (BFLOAT16,)},
    ),
    (HYPER_CLOSE, {"X_TYPE": (BFLOAT16,), "NORM_TYPE": (BFLOAT16,)}),
    (SMALL_LINEAR, {"X_TYPE": (BFLOAT16,), "W_TYPE": (BFLOAT16, FLOAT32), "TOKENS": (1, 2, 4, 8)}),
    (SWIGLU_OPEN, {"X_TYPE": (BFLOAT16, FLOAT32)}),
    (KDA_DECODE, {"X_TYPE": (BFLOAT16,), "TOKENS": (1, 8)}),
    (KDA_APPLY, {"X_TYPE": (BFLOAT16,)}),
    (MLA_OPEN, {"X_TYPE": (BFLOAT16,), "P_TYPE": (BFLOAT16,), "FP8": (0, 1)}),
    (INDEX_CHOOSE, {"X_TYPE": (BFLOAT16,)}),
    (GREEDY_ROWS, {"X_TYPE": (BFLOAT16, FLOAT32)}),
    (SAMPLE_ROWS, {"X_TYPE": (BFLOAT16, FLOAT32)}),
)


def sources(arch: str) -> list[Source]:
    """What `emberbox doctor --build` compiles: the same for every architecture."""
    del arch
    return [*of_trellis(), *of_plain(), *of_latents()]


def of_trellis() -> Iterator[Source]:
    """Products with EXL3 weights; those with float32 results, as of indexer queries, in mul1."""
    for kind, row_tiles in product(kinds(), ROW_TILES):
        yield rotated(kind, row_tiles, BFLOAT16)
        if kind[1] == CODEBOOKS["mul1"]:
            yield rotated(kind, row_tiles, FLOAT32)
        yield gate_up(kind, row_tiles)
        yield decode(kind, row_tiles, BFLOAT16, logits=1)


def of_plain() -> Iterator[Source]:
    """What knows no EXL3 and no shapes."""
    for path, values in PLAIN:
        for chosen in product(*values.values()):
            yield source(path, dict(zip(values, chosen, strict=True)))


def of_latents() -> Iterator[Source]:
    """Latent attention."""
    for shape in SHAPES:
        types = {"X_TYPE": BFLOAT16}
        for w_type in (BFLOAT16, FLOAT16):
            yield source(PRODUCTS, {**shape, **types, "W_TYPE": w_type})
        sizes = {name: shape[name] for name in ("HEADS", "LATENT")}
        for fp8 in (0, 1):
            yield source(ATTEND, {**sizes, **types, "FP8": fp8})


def rotated(kind: tuple[int, int], row_tiles: int, y_type: int) -> Source:
    """Products of rotated rows. y_type: X_TYPE, here that of the results."""
    return source(ROTATED_LINEAR, {**_tiles(kind, row_tiles), "X_TYPE": y_type})


def gate_up(kind: tuple[int, int], row_tiles: int) -> Source:
    """Gate, up and SwiGLU of rotated rows."""
    return source(ROTATED_SWIGLU, _tiles(kind, row_tiles))


def _tiles(kind: tuple[int, int], row_tiles: int) -> dict[str, int]:
    return {"RATE": kind[0], "CODEBOOK": kind[1], "ROW_TILES": row_tiles}
