"""The record of a measurement: every figure of every position in one small file. Knows no panel.

xz of: a header line of JSON (window ids and position counts), then one column after the other over
all positions: kl, reverse_kl, reference_nll, candidate_nll as float32, little-endian, byte-shuffled
(all first bytes, then all second ones, ...), and a byte of flags: bit 0 top1, bit 1 finite, bits
2 to 4 how many of the reference's first five tokens are among the candidate's.
"""

import hashlib
import logging
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emberbox.errors import MeasureError
from emberbox.measure.documents import canonical_json, read_file
from emberbox.measure.metrics import MIN_KL, TOP_K, Positions
from emberbox.store.checksums import FileDigest
from emberbox.store.durable import disk_problems, write_file

SCHEMA = "emberbox.record.v1"
COLUMNS = ("kl", "reverse_kl", "reference_nll", "candidate_nll")
POSITION_BYTES = 4 * len(COLUMNS) + 1
MAX_POSITIONS = 1 << 22  # four times the largest panel in use: 512 windows of 2,048
MAX_COMMITTED_BYTES = 1 << 20  # what the repository takes for one receipt

_TOP1, _FINITE, _TOP5_SHIFT = 1, 2, 2
_LOWEST = 2 * MIN_KL  # float32 may round it down
_MEMORY_BYTES = 256 << 20  # xz at its highest setting takes 65 MB; a header can ask for 4 GB
log = logging.getLogger(__name__)

Windows = Sequence[tuple[str, Positions]]


def write_record(path: Path, windows: Windows) -> FileDigest:
    """Write the record of `windows` (id, positions); it is on disk when this returns."""
    with disk_problems(path.parent):
        return write_file(path, [pack_record(windows)])


def pack_record(windows: Windows) -> bytes:
    """The bytes of the record's file."""
    raw = _encode(windows)
    packed = lzma.compress(raw, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)
    log.info("record: %d bytes, %d before xz", len(packed), len(raw))
    if len(packed) > MAX_COMMITTED_BYTES:
        log.warning("record: %d bytes are too large for the repository's receipts", len(packed))
    return packed


def read_record(path: Path, num_positions: Mapping[str, int]) -> dict[str, Positions]:
    """The record at `path`, which must be of the windows in `num_positions` (id -> how many).

    Columns come as float64, a position that is not finite as zeros. Raises MeasureError; whatever
    the file holds, memory is bounded by the positions that are expected.
    """
    num_bytes = len(_header(num_positions.items())) + POSITION_BYTES * sum(num_positions.values())
    raw = _inflate(path, num_bytes)
    try:
        return _decode(raw, num_positions)
    except ValueError as error:
        raise MeasureError(f"{path}: {error}", hint="the record belongs to no receipt") from None


def record_digest(windows: Windows) -> str:
    """sha256 of what the record of `windows` holds before xz: equal for equal runs."""
    return hashlib.sha256(_encode(windows)).hexdigest()


def as_stored(windows: Windows) -> dict[str, Positions]:
    """The figures as `read_record` gives them back: rounded to float32."""
    return _decode(_encode(windows), {name: len(found) for name, found in windows})


def _header(counts: Iterable[tuple[str, int]]) -> bytes:
    """The first line."""
    facts = {"schema": SCHEMA, "windows": [[name, num] for name, num in counts]}
    return canonical_json(facts) + b"\n"


def _encode(windows: Windows) -> bytes:
    whole = Positions.join([found for _, found in windows])
    parts = [_header((name, len(found)) for name, found in windows)]
    for column in COLUMNS:
        values = np.where(whole.finite, getattr(whole, column), 0).astype("<f4")  # [n]
        parts.append(values.view(np.uint8).reshape(-1, 4).T.tobytes())
    flags = whole.top1 * _TOP1 + _FINITE + (whole.top5.astype(np.int64) << _TOP5_SHIFT)
    parts.append(np.where(whole.finite, flags, 0).astype(np.uint8).tobytes())
    return b"".join(parts)


def _inflate(path: Path, num_bytes: int) -> bytes:
    """The `num_bytes` that the xz file at `path` holds, neither more nor less."""
    # xz makes nothing larger by more than its framing.
    packed = read_file(path, num_bytes + num_bytes // 100 + 1024)
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY_BYTES)
    try:
        raw = unpacker.decompress(packed, max_length=num_bytes + 1)
    except lzma.LZMAError as error:
        raise MeasureError(f"{path}: not xz: {error}") from None
    if len(raw) > num_bytes:
        raise MeasureError(f"{path}: holds more than the {num_bytes} bytes of its positions")
    if not unpacker.eof:
        raise MeasureError(f"{path}: ends too early: {len(raw)} of {num_bytes} bytes")
    if unpacker.unused_data or len(raw) != num_bytes:
        extra = len(unpacker.unused_data)
        raise MeasureError(
            f"{path}: holds {len(raw)} bytes and {extra} after its end, expected {num_bytes}"
        )
    return raw


def _decode(raw: bytes, num_positions: Mapping[str, int]) -> dict[str, Positions]:
    """Positions by window. Raises ValueError that says what is wrong."""
    header = _header(num_positions.items())
    if not raw.startswith(header):
        line = raw[:120].partition(b"\n")[0].decode("utf-8", "replace")
        raise ValueError(f"is the record of other windows: it begins with {line!r}")
    num = sum(num_positions.values())
    body = np.frombuffer(raw, np.uint8, offset=len(header))
    flags = body[4 * len(COLUMNS) * num :]
    finite = (flags & _FINITE) != 0
    columns = {
        name: _widened(body[4 * num * index : 4 * num * (index + 1)])
        for index, name in enumerate(COLUMNS)
    }
    for name, values in columns.items():
        _require(bool(np.isfinite(values).all()), f"{name}: holds what is no number")
        _require(bool((values >= _LOWEST).all()), f"{name}: holds a value below zero")
        _require(not values[~finite].any(), f"{name}: a figure where there was none")
    top5 = flags >> _TOP5_SHIFT
    _require(bool((top5 <= TOP_K).all()), "flags: more than five of five")
    _require(not flags[~finite].any(), "flags: set where there was no figure")
    whole = Positions(
        **columns, top1=(flags & _TOP1) != 0, top5=top5.astype(np.uint8), finite=finite
    )
    return _split(whole, num_positions)


def _widened(planes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """[n] float64 from four planes of bytes."""
    return np.ascontiguousarray(planes.reshape(4, -1).T).view("<f4")[:, 0].astype(np.float64)


def _split(whole: Positions, num_positions: Mapping[str, int]) -> dict[str, Positions]:
    names = [field.name for field in fields(Positions)]
    found, start = {}, 0
    for window, num in num_positions.items():
        part = slice(start, start + num)
        found[window] = Positions(**{name: getattr(whole, name)[part] for name in names})
        start += num
    return found


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
