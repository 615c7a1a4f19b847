"""After the last sublayer on a GPU: one launch, a block for each token."""

from pathlib import Path

from torch import Tensor

from emberbox.ops.contract import expect
from emberbox.ops.hyper_open.kernel_cuda import (
    check_streams,
    outputs_for,
    spread_arguments,
    three,
)
from emberbox.ops.launch import TYPES, Program

SOURCE = Path(__file__).with_name("hyper_close.cu")
MEAN_BYTES = 4  # of a channel, in shared memory


def hyper_close(  # noqa: PLR0913  three ops in one
    streams: Tensor,
    ys: tuple[Tensor, ...],
    post: Tensor,
    mix: Tensor,
    norm: Tensor,
    suhs: tuple[Tensor, ...],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As the contract says, for 4 streams of whole Hadamard blocks. Raises OpError for others."""
    check_streams("hyper_close", streams, ys, suhs)
    T, _, H = streams.shape
    expect("hyper_close: a weight", norm, (H,), *TYPES)
    hidden, rotated = outputs_for(streams, len(suhs))
    if T == 0:
        return hidden, rotated
    macros = (("X_TYPE", TYPES[streams.dtype]), ("NORM_TYPE", TYPES[norm.dtype]))
    args = (*spread_arguments(streams, ys, post, mix), norm, *three(suhs), hidden, rotated)
    sizes = (T, H, len(suhs), float(eps))
    program = Program(SOURCE, macros, streams.device)
    program.launch("close_streams", T, (*args, *sizes), MEAN_BYTES * H)
    return hidden, rotated
