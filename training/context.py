"""What every layer of the training graph is handed: config, parameters, functions, and rows."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from emberbox.model.config import Glm5NextConfig, TextConfig
from training.pointwise import Pointwise


@dataclass(frozen=True, slots=True)
class Rows:
    """B rows of T tokens, flattened to B * T wherever tokens stand alone.

    valid [B * T] float32: 1 for a token, 0 for padding, which no balance or index loss counts.
    dense: a scalar tensor; where it is positive, attention sees everything before it.
    """

    num_rows: int
    length: int
    valid: Tensor
    dense: Tensor

    @property
    def device(self) -> torch.device:
        return self.valid.device

    def places(self) -> Tensor:
        """[T] int64, 0 .. T-1."""
        return torch.arange(self.length, device=self.device)


@dataclass(frozen=True, slots=True)
class Context:
    """Parameters under the names of parameters.py, float32; activations are of `dtype`."""

    config: Glm5NextConfig
    params: Mapping[str, Tensor]
    fused: Pointwise
    dtype: torch.dtype

    @property
    def text(self) -> TextConfig:
        return self.config.text

    def linear(self, x: Tensor, name: str, *, bias: bool = False) -> Tensor:
        """x [..., K] times `<name>.weight`, plus `<name>.bias`, in x's dtype."""
        weight = self.params[f"{name}.weight"].flatten(1).to(x.dtype)
        return functional.linear(
            x, weight, self.params[f"{name}.bias"].to(x.dtype) if bias else None
        )

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm of token rows x [T, D]."""
        return self.fused.rms_norm(x, self.params[f"{name}.weight"], self.text.rms_norm_eps)
