"""Pooling of indexer keys in plain torch."""

import torch
from torch import Tensor


def index_pool(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    wide = torch.promote_types(keys.dtype, torch.float32)
    share = torch.softmax(gates.to(wide) + ape.to(wide), dim=-2)
    return (share * keys.to(wide)).sum(-2)
