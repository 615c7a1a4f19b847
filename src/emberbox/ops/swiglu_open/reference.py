"""SwiGLU, then the rotation, in plain torch."""

from torch import Tensor

from emberbox.ops.rotation import rotate
from emberbox.ops.swiglu.reference import swiglu


def swiglu_open(gate_up: Tensor, limit: float, suh: Tensor | None) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    y = swiglu(gate, up, limit)
    return y if suh is None else rotate(y, suh)
