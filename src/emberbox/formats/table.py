"""The one list of formats, and which of them a checkpoint uses for a weight.

A new format is one instance in a file of its own and one entry in FORMATS.
"""

from collections.abc import Mapping

from emberbox.formats import bf16, exl3, fp8_block, nvfp4
from emberbox.formats.base import Format, StoredTensor
from emberbox.formats.dtypes import DTYPE_TAGS

FORMATS: tuple[Format, ...] = (
    bf16.FORMAT,
    fp8_block.FORMAT,
    nvfp4.FORMAT,
    nvfp4.RECIPROCAL,
    exl3.FORMAT,
)


def detect(
    prefix: str, infos: Mapping[str, StoredTensor], formats: tuple[Format, ...] = FORMATS
) -> Format | None:
    """The format of the weight at `prefix` (without `.weight`), by the tensors that lie there.

    Of the formats with all required parts present, the one whose dtypes fit, then the one that
    explains most tensors, then the earlier in `formats`. A format whose dtypes do not fit is
    still returned where none does: `Format.problems` then says what is wrong. None: no format has
    its parts here. Configuration is never consulted: published lists of quantised modules do not
    match the tensors beside them (architecture.md 2).
    """
    best: tuple[bool, int] | None = None
    chosen = None
    for candidate in formats:
        rank = _rank(candidate, prefix, infos)
        if rank is not None and (best is None or rank > best):
            best, chosen = rank, candidate
    return chosen


def _rank(
    candidate: Format, prefix: str, infos: Mapping[str, StoredTensor]
) -> tuple[bool, int] | None:
    """(dtypes fit, parts present); None if a required part is absent."""
    dtypes_fit, num_present = True, 0
    for part in candidate.parts.values():
        info = infos.get(prefix + part.suffix)
        if info is not None:
            num_present += 1
            dtypes_fit &= info.dtype in {DTYPE_TAGS[dtype] for dtype in part.dtypes}
        elif not part.optional:
            return None
    return dtypes_fit, num_present
