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
        collapsed, post, mix = self.ops.hyper_mix(
            streams, self.fn, self.base, self.scale, self.eps, self.iterations
        )
        return self.ops.hyper_update(streams, sublayer(self.norm(collapsed)), post, mix)
