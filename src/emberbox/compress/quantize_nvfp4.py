"""Round weights to NVFP4: nearest code, ties to even. One global scale for those read together."""

from collections.abc import Mapping

import torch
from torch import Tensor

from emberbox.compress.quantize_fp8 import checked_matrix
from emberbox.errors import OpError
from emberbox.formats.base import QuantTensor
from emberbox.formats.nvfp4 import BLOCK, FORMAT, MAX_CODE, MAX_SCALE


def quantize_nvfp4(weights: Mapping[str, Tensor]) -> dict[str, QuantTensor]:
    """Name -> float [out, in], all of one width, one dtype and on one device -> the same in NVFP4.

    All get one `weight_scale_2`, from the largest weight of any: programs that compute gate and up
    as one product read only one of the two. Elsewhere, give one weight at a time. Raises OpError
    naming the weight that is no matrix, has a width that is no multiple of 16 or the others do not
    have, or holds a value that is not finite or that float32 cannot hold once it is rounded.
    """
    widths = {checked_matrix(name, weight).shape[1] for name, weight in weights.items()}
    for name, weight in weights.items():
        if weight.shape[1] % BLOCK or len(widths) > 1:
            wanted = "that of the others" if len(widths) > 1 else f"a multiple of {BLOCK}"
            raise OpError(f"{name}: nvfp4: width {weight.shape[1]} is not {wanted}")
    # Rows know of each other only through the global scale, so one encoding serves all.
    parts = FORMAT.encode(torch.cat(list(weights.values())))
    if not torch.isfinite(
        parts["global"] * (MAX_CODE * MAX_SCALE)
    ):  # rounded up, so beyond float32
        raise OpError(f"{', '.join(weights)}: nvfp4: the largest value decodes to infinity")
    found, start = {}, 0
    for name, weight in weights.items():
        rows = slice(start, start := start + weight.shape[0])
        own = {"codes": parts["codes"][rows].clone(), "scales": parts["scales"][rows].clone()}
        shape = (weight.shape[0], weight.shape[1])
        found[name] = QuantTensor(FORMAT, own | {"global": parts["global"].clone()}, shape)
    return found
