"""Working memory of kernels on a device, one piece per purpose, which all launches share.

They share it one after another: kernels of one stream only, or of streams that wait for each other.
Pieces grow when more is asked for, but never while a graph is captured: what a graph will use is
taken before, by the same calls, and is kept for it. Counters are zero between launches: whoever
counts to the end sets them back.
"""

import torch
from torch import Tensor

from emberbox.errors import OpError

LEAST = 1 << 16  # numbers: small pieces need not grow one by one
_pieces: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
_captured: dict[int, Tensor] = {}  # a graph may still write there after a piece was replaced


def scratch(purpose: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[at least size], of any content. Raises OpError where a captured graph would need more."""
    return _piece(purpose, size, dtype, device)


def counters(size: int, device: torch.device) -> Tensor:
    """int32 [at least size], zero. Raises OpError as `scratch` does."""
    return _piece("counters", size, torch.int32, device)


def _piece(purpose: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    key = (purpose, dtype, device)
    held = _pieces.get(key)
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if held is None or held.numel() < size:
        if is_captured:
            raise OpError(
                f"working memory {purpose!r}: {size} numbers are needed while a graph is captured",
                hint="call the same once before, outside of the capture",
            )
        make = torch.zeros if purpose == "counters" else torch.empty
        held = _pieces[key] = make(max(size, LEAST), dtype=dtype, device=device)
    if is_captured:
        _captured[held.data_ptr()] = held
    return held
