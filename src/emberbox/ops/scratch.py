"""Working memory of kernels on a device, one piece per purpose, which launches of a stream share.

Pieces only grow, and are best first taken before a graph is captured, whose own memory they would
lie in otherwise; a captured graph keeps the piece that it was captured with alive. Counters are
zero between launches: whoever counts to the end sets them back.
"""

import torch
from torch import Tensor

_pieces: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
_outgrown: list[Tensor] = []  # a captured graph may still write there


def scratch(purpose: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[at least size], of any content."""
    return _piece(purpose, size, dtype, device)


def counters(size: int, device: torch.device) -> Tensor:
    """int32 [at least size], zero."""
    return _piece("counters", size, torch.int32, device)


def _piece(purpose: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    key = (purpose, dtype, device)
    held = _pieces.get(key)
    if held is None or held.numel() < size:
        size = max(size, 1 << 16)
        if held is not None:
            _outgrown.append(held)
        held = _pieces[key] = torch.zeros(size, dtype=dtype, device=device)
    return held
