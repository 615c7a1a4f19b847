"""View what callers hand in as plain bytes. Knows nothing of files."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]


def byte_view(buffer: Buffer) -> memoryview:
    """The memory of `buffer` as one row of bytes, not copied.

    Raises TypeError for memory that is not C-contiguous.
    """
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    # memoryview refuses to cast a shape that holds a zero.
    return view.cast("B") if view.nbytes else memoryview(bytearray())
