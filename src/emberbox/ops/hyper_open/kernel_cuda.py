"""Between two sublayers on a GPU, in two launches: update and sums by columns, then the rest.

Made for a decode step of a few tokens; takes any number.
"""

from pathlib import Path

import torch
from torch import Tensor

from emberbox.formats.exl3 import BLOCK
from emberbox.ops.contract import expect, require
from emberbox.ops.hyper_open import MAX_RESULTS, MAX_SCALES, STREAMS
from emberbox.ops.launch import TYPES, Program, num_multiprocessors
from emberbox.ops.scratch import scratch

SOURCE = Path(__file__).with_name("hyper_open.cu")
COLUMNS, TOKENS = 32, 8  # of a block of the first launch
NUM_SUMS = STREAMS * (STREAMS + 2) + 10  # products with fn; pairs of streams
MAX_SPAN = 8  # groups of 128 channels in a block of the second launch
BLOCKS_PER_MULTIPROCESSOR = 2


def hyper_open(  # noqa: PLR0913  four ops in one
    streams: Tensor,
    ys: tuple[Tensor, ...],
    post: Tensor,
    mix: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    suhs: tuple[Tensor, ...],
    eps: tuple[float, float],
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the contract says, for 4 streams of whole Hadamard blocks. Raises OpError for others."""
    check_streams("hyper_open", streams, ys, suhs)
    T, S, H = streams.shape
    device, wide = streams.device, torch.float32
    _check_weights(streams, fn, base, scale, norm)
    x, rotated = outputs_for(streams, len(suhs))
    next_post = torch.empty(T, S, dtype=wide, device=device)
    next_mix = torch.empty(T, S, S, dtype=wide, device=device)
    if T == 0:
        return x, rotated, next_post, next_mix
    types = {"X_TYPE": streams.dtype, "FN_TYPE": fn.dtype, "NORM_TYPE": norm.dtype}
    macros = tuple((name, TYPES[dtype]) for name, dtype in types.items())
    program = Program(SOURCE, macros, device)
    partial = scratch("hyper", T * NUM_SUMS * (H // COLUMNS), wide, device)
    spread = spread_arguments(streams, ys, post, mix)
    blocks = H // COLUMNS * -(-T // TOKENS)
    program.launch("spread_streams", blocks, (*spread, fn, partial, T, H))
    groups = H // BLOCK
    span = _span(T * groups, groups, device)
    weights = (base, scale, norm, *three(suhs))
    sizes = (T, H, len(suhs), span, iterations, *map(float, eps))
    args = (streams, partial, *weights, x, rotated, next_post, next_mix, *sizes)
    program.launch("collapse_streams", T + T * -(-groups // span), args)
    return x, rotated, next_post, next_mix


def check_streams(
    name: str, streams: Tensor, ys: tuple[Tensor, ...], suhs: tuple[Tensor, ...]
) -> None:
    """Raises OpError where kernels of streams cannot take them; name: of the op."""
    T, S, H = streams.shape
    require(
        streams.dtype in TYPES and streams.is_contiguous(),
        "{}: streams are {}, expected contiguous ones of {}",
        name,
        streams.dtype,
        list(TYPES),
    )
    require(S == STREAMS and H % BLOCK == 0, "{}: {} streams of {}, not 4 x 128 n", name, S, H)
    require(len(ys) <= MAX_RESULTS, "{}: {} results, at most 2", name, len(ys))
    require(len(suhs) <= MAX_SCALES, "{}: {} scales, at most 3", name, len(suhs))
    for y in ys:
        expected = (T, H), streams.dtype
        found = tuple(y.shape), y.dtype
        require(found == expected, "{}: a result is {}, expected {}", name, found, expected)
    for suh in suhs:
        expect(f"{name}: a weight", suh, (H,), torch.float16)


def outputs_for(streams: Tensor, num_scales: int) -> tuple[Tensor, Tensor]:
    """Empty x [T, H] and rotated [num_scales, T, H]."""
    T, _, H = streams.shape
    x = torch.empty(T, H, dtype=streams.dtype, device=streams.device)
    return x, torch.empty(num_scales, T, H, dtype=torch.float16, device=streams.device)


def spread_arguments(
    streams: Tensor, ys: tuple[Tensor, ...], post: Tensor, mix: Tensor
) -> tuple[Tensor | None, ...]:
    """streams, two results, post and mix of a launch; None where there is nothing to be read.

    Raises OpError for coefficients of other tokens.
    """
    if not ys:
        return streams, None, None, None, None
    T, S, _ = streams.shape
    found = tuple(post.shape), tuple(mix.shape)
    require(found == ((T, S), (T, S, S)), "post and mix of {} tokens are {}", T, found)
    first, second = (*map(_aligned, ys), None)[:2]
    return streams, first, second, post.float().contiguous(), mix.float().contiguous()


def three(suhs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Scales of a launch."""
    return (*suhs, None, None, None)[:MAX_SCALES]


def _check_weights(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor) -> None:
    _, S, H = streams.shape
    rows = (S + 2) * S
    for vector, size in ((base, rows), (scale, 3)):
        expect("hyper_open: a weight", vector, (size,), torch.float32)
    expect("hyper_open: a weight", fn, (rows, S * H), *TYPES)
    expect("hyper_open: a weight", norm, (H,), *TYPES)


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, and where four numbers can be read at once."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % (4 * tensor.element_size()) else tensor


def _span(tasks: int, groups: int, device: torch.device) -> int:
    """Groups of channels for a block, so that blocks fill the device and repeat no more sums than
    that takes."""
    blocks = BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors(device)
    return min(MAX_SPAN, groups, max(1, tasks // blocks))
