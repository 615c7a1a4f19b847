"""Weights in the form that products read, once, at load: prepared for a kernel, or decoded.

A reference decodes at every product; that is most of its time. Knows no formats.
"""

from collections.abc import Container

import torch

from emberbox.errors import LoadRefused
from emberbox.formats.base import QuantTensor
from emberbox.model.layers import Operand
from emberbox.model.weights import is_finite
from emberbox.ops.table import OpTable


def decode_once(
    params: dict[str, Operand], dtype: torch.dtype, where: str, *, kept: Container[str] = ()
) -> dict[str, Operand]:
    """`params` with every quantised weight in `dtype`, but for those of formats named in `kept`.

    Takes `params` over: a weight's stored form is dropped as soon as it is decoded. Raises
    LoadRefused naming every weight with a value that `dtype` cannot hold.
    """
    bad = []
    for name, value in params.items():
        if isinstance(value, QuantTensor) and value.format.name not in kept:
            params[name] = weight = value.decode().to(dtype)
            if not is_finite(weight):
                bad.append(f"{name}: decodes to values that {dtype} cannot hold")
    if bad:
        raise LoadRefused(where, bad, hint="the scales are damaged, or another dtype is needed")
    return params


def prepare_once(params: dict[str, Operand], ops: OpTable) -> dict[str, Operand]:
    """`params` with every quantised weight as the product of its format reads it.

    Takes `params` over: a weight's stored form is dropped as soon as it is prepared.
    """
    for name, value in params.items():
        if isinstance(value, QuantTensor):
            params[name] = ops.ready(value)
    return params
