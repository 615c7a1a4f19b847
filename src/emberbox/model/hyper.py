"""Hyper-connections: four residual streams, mixed around each sublayer (architecture.md 3.1)."""

from collections.abc import Callable

import torch
from torch import Tensor

from emberbox.model.config import TextConfig
from emberbox.model.layers import Parameters, RMSNorm, plain
from emberbox.ops.table import OpTable


def open_streams(x: Tensor, num_streams: int) -> Tensor:
    """Start: every stream is the embedding. x [T, hidden] -> [T, S, hidden]."""
    return x.unsqueeze(1).expand(-1, num_streams, -1)


def mean_of_streams(streams: Tensor) -> Tensor:
    """End: the plain mean, no learned head. [T, S, hidden] -> [T, hidden]."""
    wide = torch.promote_types(streams.dtype, torch.float32)
    return streams.to(wide).mean(1).to(streams.dtype)


class HyperConnection:
    """Wraps one sublayer: collapse the streams, norm, run it, spread the result."""

    def __init__(
        self, config: TextConfig, ops: OpTable, params: Parameters, prefix: str, norm: RMSNorm
    ) -> None:
        """`prefix` is "…layers.N.hc_attn_" or "…layers.N.hc_ffn_"."""
        self.ops, self.norm = ops, norm
        self.fn = plain(params, f"{prefix}fn")
        self.base = plain(params, f"{prefix}base")
        self.scale = plain(params, f"{prefix}scale")
        self.eps = (config.rms_norm_eps, config.hc_eps)
        self.iterations = config.hc_sinkhorn_iters

    def __call__(self, streams: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """streams [T, S, hidden] -> [T, S, hidden]."""
        pieces = [streams]
        self.over(pieces, sublayer)
        return pieces[0]

    def over(self, streams: list[Tensor], sublayer: Callable[[Tensor], Tensor]) -> None:
        """The same for a batch whose streams lie in pieces [n, S, hidden], which are replaced."""
        opened, spreads = [], []
        for piece in streams:
            collapsed, *spread = self.ops.hyper_mix(
                piece, self.fn, self.base, self.scale, self.eps, self.iterations
            )
            opened.append(self.norm(collapsed))
            spreads.append(spread)
        x = opened[0] if len(opened) == 1 else torch.cat(opened)
        del opened  # a copy of x
        results = sublayer(x).split_with_sizes([len(piece) for piece in streams])
        for i, (y, spread) in enumerate(zip(results, spreads, strict=True)):
            streams[i] = self.ops.hyper_update(streams[i], y, *spread)
