"""Read and check the header of one safetensors file. Knows bytes and names; knows no torch.

The format: 8 bytes little-endian header length, a JSON object of that length
`{name: {"dtype", "shape", "data_offsets": [start, stop]}}` with an optional `"__metadata__"` object
of strings, then the data section, to which the offsets are relative and which the tensors cover
without gap or overlap. A number from the file is compared with the file's size before anything is
allocated from it; every violation has an error class of its own.
"""

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from emberbox.errors import (
    DuplicateName,
    HeaderError,
    HeaderSyntax,
    HeaderTooLarge,
    OverlappingTensors,
    TruncatedFile,
    UncoveredBytes,
    UnknownDtype,
    WrongSize,
)
from emberbox.store.strict_json import DuplicateKey, JsonProblem, parse_object

MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself
LENGTH_BYTES = 8
METADATA_KEY = "__metadata__"
MAX_INTEGER = 2**63 - 1  # no file is larger; keeps products of hostile shapes short

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})
_DAMAGED = "the file is damaged or was not written by a safetensors writer: fetch it again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: bytes `start` to `stop` of `file`, counted from the file's beginning.

    `dtype` is the safetensors tag (BF16, F32, F8_E4M3, ...), `shape` row-major.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return self.stop - self.start


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of the file at `path`, in the order of the data. Reads no data.

    Raises the HeaderError family; the message names the file, and the tensor where one is at fault.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise HeaderError(f"{path}: not a regular file")
        with path.open("rb") as file:
            raw = _read_json_bytes(file, path, status.st_size)
    except OSError as error:
        raise HeaderError(f"{path}: cannot be read: {error.strerror}") from error
    header = _parse(raw, path)
    data_start = LENGTH_BYTES + len(raw)
    infos = [_tensor_info(name, entry, path, data_start) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.start, info.stop))
    _check_cover(infos, path, data_start, status.st_size)
    return {info.name: info for info in infos}


def num_data_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor of this tag and shape; None if not whole bytes or more than any file has.

    `dtype` must be a key of DTYPE_BITS.
    """
    num_bits = DTYPE_BITS[dtype]
    if 0 in shape:
        return 0
    for size in shape:
        num_bits *= size
        if num_bits > 8 * MAX_INTEGER:
            return None
    return None if num_bits % 8 else num_bits // 8


def _read_json_bytes(file: BinaryIO, path: Path, file_bytes: int) -> bytes:
    prefix = file.read(LENGTH_BYTES)
    if len(prefix) < LENGTH_BYTES:
        raise TruncatedFile(
            f"{path}: {len(prefix)} bytes long, the header length alone takes {LENGTH_BYTES}",
            hint="fetch the file again",
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderTooLarge(
            f"{path}: header of {length} bytes, the limit is {MAX_HEADER_BYTES}", hint=_DAMAGED
        )
    if length > file_bytes - LENGTH_BYTES:
        raise TruncatedFile(
            f"{path}: header of {length} bytes, but the file has {file_bytes} in all",
            hint="fetch the file again",
        )
    raw = file.read(length)
    if len(raw) < length:
        raise TruncatedFile(f"{path}: the file shrank while its header was read")
    return raw


def _parse(raw: bytes, path: Path) -> dict[str, object]:
    try:
        header = parse_object(raw)
    except DuplicateKey as problem:
        raise DuplicateName(f"{path}: header: {problem}", hint=_DAMAGED) from None
    except JsonProblem as problem:
        raise HeaderSyntax(f"{path}: header: {problem}", hint=_DAMAGED) from None
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderSyntax(f"{path}: {METADATA_KEY} is not an object of strings", hint=_DAMAGED)
    return header


def _tensor_info(name: str, entry: object, path: Path, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise HeaderSyntax(f"{where}: expected an object of dtype, shape and data_offsets only")
    dtype = entry["dtype"]
    if not isinstance(dtype, str):
        raise HeaderSyntax(f"{where}: dtype is not a string")
    if dtype not in DTYPE_BITS:
        raise UnknownDtype(
            f"{where}: dtype {dtype[:40]!r} is not one of the format: {', '.join(DTYPE_BITS)}"
        )
    shape = _sizes(entry["shape"], f"{where}: shape")
    offsets = _sizes(entry["data_offsets"], f"{where}: data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderSyntax(f"{where}: data_offsets is not [start, stop] with start <= stop")
    start, stop = offsets
    expected = num_data_bytes(dtype, shape)
    if expected != stop - start:
        need = "no possible number of" if expected is None else expected
        raise WrongSize(
            f"{where}: {dtype} of shape {_shown(shape)} needs {need} bytes, "
            f"data_offsets give {stop - start}",
            hint=_DAMAGED,
        )
    return TensorInfo(name, dtype, shape, path, data_start + start, data_start + stop)


def _sizes(value: object, where: str) -> tuple[int, ...]:
    # `type() is int`: a JSON `true` is an int to isinstance.
    if not isinstance(value, list) or not all(
        type(item) is int and 0 <= item <= MAX_INTEGER for item in value
    ):
        raise HeaderSyntax(f"{where}: expected a list of integers from 0 to {MAX_INTEGER}")
    return tuple(value)


def _shown(shape: tuple[int, ...]) -> str:
    return str(list(shape)) if len(shape) <= 8 else f"[{shape[0]}, {shape[1]}, ...]"


def _check_cover(infos: list[TensorInfo], path: Path, data_start: int, file_bytes: int) -> None:
    position, previous = data_start, "the header"
    for info in infos:
        if info.start < position:
            raise OverlappingTensors(
                f"{path}: tensor {info.name!r} starts at byte {info.start}, "
                f"but {previous} goes to byte {position}",
                hint=_DAMAGED,
            )
        if info.start > position:
            raise UncoveredBytes(
                f"{path}: bytes {position} to {info.start}, before tensor {info.name!r}, "
                f"belong to no tensor",
                hint=_DAMAGED,
            )
        position, previous = info.stop, f"tensor {info.name!r}"
    if position > file_bytes:
        lost = next(info for info in infos if info.stop > file_bytes)
        raise TruncatedFile(
            f"{path}: {file_bytes} bytes long, its header describes {position}: "
            f"tensor {lost.name!r} is cut, and what follows it",
            hint="the download is not complete: fetch the file again",
        )
    if position < file_bytes:
        raise UncoveredBytes(
            f"{path}: {file_bytes - position} bytes after the last tensor belong to no tensor",
            hint=_DAMAGED,
        )
