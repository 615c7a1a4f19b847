"""Round a weight to block FP8: nearest code, the largest of each 128 x 128 block is 448."""

from torch import Tensor

from emberbox.errors import OpError
from emberbox.formats.base import QuantTensor
from emberbox.formats.fp8_block import FORMAT
from emberbox.model.weights import is_finite


def quantize_fp8(name: str, weight: Tensor) -> QuantTensor:
    """float [out, in] on any device -> E4M3 codes and a float32 scale per block, on that device.

    Blocks at the right and lower edge may be partial. Raises OpError as `checked_matrix` does.
    """
    return FORMAT.quantize(checked_matrix(name, weight))


def checked_matrix(name: str, weight: Tensor) -> Tensor:
    """`weight` as it is. Raises OpError naming one that is no matrix, empty, or not finite."""
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise OpError(
            f"{name}: expected a floating-point [out, in] weight, got {weight.dtype} "
            f"{list(weight.shape)}"
        )
    if not is_finite(weight):
        raise OpError(f"{name}: holds NaN or infinity")
    return weight
