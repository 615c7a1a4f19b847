"""Decode quantised weights once, at load, where no kernel reads them as they are stored.

A reference decodes at every product; on a CPU that is most of its time. Knows no formats.
"""

import torch

from emberbox.errors import LoadRefused
from emberbox.formats.base import QuantTensor
from emberbox.model.layers import Operand
from emberbox.model.weights import is_finite


def decode_once(params: dict[str, Operand], dtype: torch.dtype, where: str) -> dict[str, Operand]:
    """`params` with every quantised weight in `dtype`.

    Takes `params` over: a weight's stored form is dropped as soon as it is decoded. Raises
    LoadRefused naming every weight with a value that `dtype` cannot hold.
    """
    bad = []
    for name, value in params.items():
        if isinstance(value, QuantTensor):
            params[name] = weight = value.decode().to(dtype)
            if not is_finite(weight):
                bad.append(f"{name}: decodes to values that {dtype} cannot hold")
    if bad:
        raise LoadRefused(where, bad, hint="the scales are damaged, or another dtype is needed")
    return params
