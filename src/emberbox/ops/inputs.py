"""Seeded random tensors for contract cases."""

import torch
from torch import Tensor


class Random:
    """A seeded source of CPU tensors; `normal` is standard normal times `scale`."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, dtype=torch.float32) * scale
        return x.to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """float32 in [low, high)."""
        return torch.rand(*shape, generator=self.generator) * (high - low) + low

    def integers(self, *shape: int, high: int) -> Tensor:
        """int64 in [0, high)."""
        return torch.randint(high, shape, generator=self.generator)
