"""The whole layer in one launch: one block for each sequence and head.

It reads states, history, slots and counts before the kernel ahead of it has ended: that kernel must
not write them. So two launches for one layer do not follow each other directly, nor does one follow
kda_apply.
"""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.ops.contract import expect, require
from emberbox.ops.kda_decode.reference import Four, Pair, Weights
from emberbox.ops.launch import STEP_TYPES, Program

SOURCE = Path(__file__).with_name("kda_decode.cu")
D = 128
TAPS = 4
BLOCK = 512  # threads
MAX_TOKENS = 8
MAX_RANK = 512
# Of shared memory: numbers of a token; of the partial sums and of one change.
TOKEN_FLOATS, FLOATS = 6 * D + 4, 16 * (2 * D + 8) + D
PAD = 32


def kda_decode(
    inputs: Pair,
    weights: Weights,
    cache: Pair,
    pending: Four,
    rows: Pair,
    constants: tuple[float, float],
) -> Tensor:
    """All on one CUDA device; qkv float32 or bfloat16. Raises OpError for other types or shapes,
    and for weights that are not as `ready_weights` makes them: they are read before the turn.
    """
    qkv = inputs[0]
    sizes = _sizes(qkv, weights, rows)
    _check(inputs, weights, sizes)
    _check_held(qkv, cache, pending, rows, sizes)
    M, H, R = sizes
    is_rotated = weights[6] is not None
    result = torch.float16 if is_rotated else qkv.dtype
    y = torch.empty(len(qkv), H * D, dtype=result, device=qkv.device)
    macros = (("X_TYPE", STEP_TYPES[qkv.dtype]), ("TOKENS", 1 if M == 1 else MAX_TOKENS))
    program = Program(SOURCE, macros, qkv.device)
    program.launch(
        "kda_decode",
        len(rows[0]) * H,
        (*inputs, *weights, *cache, *pending, *rows, y, M, H, R, *map(float, constants)),
        4 * (M * TOKEN_FLOATS + FLOATS) + M * (2 * R + PAD) * qkv.element_size(),
        threads=BLOCK,
    )
    return y


def ready_weights(weights: Weights) -> Weights:
    """As the kernel reads them; f_b and g_b, which it wants in the activations' type, stay in their
    own: those of a network have it."""
    f_b, g_b, conv, A_log, dt_bias, o_norm, suh = weights
    return (
        f_b.contiguous(),
        g_b.contiguous(),
        conv.float().contiguous(),
        A_log.float().contiguous(),
        dt_bias.float().contiguous(),
        o_norm.float().contiguous(),
        None if suh is None else suh.half().contiguous(),
    )


def _sizes(qkv: Tensor, weights: Weights, rows: Pair) -> tuple[int, int, int]:
    """M, H, R."""
    require(
        qkv.dtype in STEP_TYPES, "kda_decode: qkv is {}, expected {}", qkv.dtype, list(STEP_TYPES)
    )
    T, B, R = len(qkv), len(rows[0]), weights[0].shape[-1]
    require(
        0 < B <= T <= MAX_TOKENS * B and T % B == 0,
        "kda_decode: {} rows for {} sequences, expected 1..{} for each of them",
        T,
        B,
        MAX_TOKENS,
    )
    require(
        0 < R <= MAX_RANK and R % 8 == 0,
        "kda_decode: f_b has {} inputs, expected a multiple of 8 up to {}",
        R,
        MAX_RANK,
    )
    return T // B, len(weights[3]), R


def _check(inputs: Pair, weights: Weights, sizes: tuple[int, int, int]) -> None:
    (qkv, small), (_, H, R) = inputs, sizes
    wide, dtype, T = torch.float32, qkv.dtype, len(qkv)
    expect("kda_decode: qkv", qkv, (T, 3 * H * D), dtype)
    expect("kda_decode: small", small, (T, 2 * R + H), wide)
    *others, suh = weights
    wanted = (
        ("f_b", (H * D, R), dtype),
        ("g_b", (H * D, R), dtype),
        ("conv", (3 * H * D, TAPS), wide),
        ("A_log", (H,), wide),
        ("dt_bias", (H * D,), wide),
        ("o_norm", (D,), wide),
    )
    for weight, (name, shape, kind) in zip(others, wanted, strict=True):
        expect(f"kda_decode: {name}", weight, shape, kind)
    if suh is not None:
        expect("kda_decode: suh", suh, (H * D,), torch.float16)


def _check_held(
    qkv: Tensor, cache: Pair, pending: Four, rows: Pair, sizes: tuple[int, int, int]
) -> None:
    (M, H, _), T, wide = sizes, len(qkv), torch.float32
    N = len(cache[0])
    expect("kda_decode: history", cache[0], (N, TAPS - 1, 3 * H * D), qkv.dtype)
    expect("kda_decode: states", cache[1], (N, H, D, D), wide)
    expect("kda_decode: pending inputs", pending[0], (T, 3 * H * D), qkv.dtype)
    for name, each in zip(("k", "gate", "deltas"), pending[1:], strict=True):
        expect(f"kda_decode: pending {name}", each, (T, H, D), wide)
    for name, each in zip(("slots", "counts"), rows, strict=True):
        expect(f"kda_decode: {name}", each, (T // M,), torch.int32)
