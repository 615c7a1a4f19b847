"""SHA256SUMS: what every file of a checkpoint folder should be, in the format of `sha256sum -c`.

A line is `<64 hex digits>  <name>`, sorted by name, for every file but the list itself. Hidden
files and folders (what version control and download tools leave) are not part of a checkpoint.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from emberbox.errors import CheckpointError

SUMS_NAME = "SHA256SUMS"
READ_BYTES = 4 << 20
MAX_SUMS_BYTES = 64 << 20  # some 500,000 files

OnBytes = Callable[[int], None]  # is told how many more bytes were read

# The star is what `sha256sum --binary` writes.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?([^\\\n]+)")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file holds, in few bytes."""

    num_bytes: int
    sha256: str  # 64 hex digits


def require_regular(path: Path) -> None:
    """Raises OSError for what is no file, or not there: a pipe would be waited for without end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def digest_file(path: Path, on_bytes: OnBytes = lambda _: None) -> FileDigest:
    """Read `path`, a regular file, to its end. Raises OSError."""
    require_regular(path)
    hasher, num_bytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            num_bytes += count
            on_bytes(count)
    return FileDigest(num_bytes, hasher.hexdigest())


def hash_next(
    file: BinaryIO,
    num_bytes: int,
    hashers: Sequence["hashlib._Hash"],
    on_bytes: OnBytes = lambda _: None,
) -> None:
    """Feed the next `num_bytes` of `file` to all `hashers`. Raises CheckpointError if it ends."""
    while num_bytes:
        chunk = file.read(min(num_bytes, READ_BYTES))
        if not chunk:
            raise CheckpointError(f"{file.name}: became shorter while it was read")
        for hasher in hashers:
            hasher.update(chunk)
        num_bytes -= len(chunk)
        on_bytes(len(chunk))


def require_digest(path: Path, expected: FileDigest, on_bytes: OnBytes = lambda _: None) -> None:
    """Read `path`. Raises CheckpointError unless it holds what is expected."""
    try:
        found = digest_file(path, on_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if found != expected:
        raise CheckpointError(f"{path}: holds {found}, expected {expected}")


def sums_text(sha256_of: Mapping[str, str]) -> str:
    """The text of SHA256SUMS for a folder of these files (name -> hex digits)."""
    return "".join(f"{sha256_of[name]}  {name}\n" for name in sorted(sha256_of))


def verify_checksums(folder: Path, on_bytes: OnBytes = lambda _: None) -> int:
    """Read every file of `folder`, compare it with SHA256SUMS, return how many files there are.

    Raises CheckpointError that names each file that differs, is missing, or is not in the list.
    """
    listed = read_sums(folder / SUMS_NAME)
    unlisted: list[OSError] = []
    found = visible_files(folder, unlisted.append) - {SUMS_NAME}
    faults = [f"{error.filename}: cannot be read: {error.strerror}" for error in unlisted]
    faults += [f"{name}: listed, but not there" for name in sorted(listed.keys() - found)]
    faults += [f"{name}: there, but not listed" for name in sorted(found - listed.keys())]
    for name in sorted(found & listed.keys()):
        try:
            sha256 = digest_file(folder / name, on_bytes).sha256
        except OSError as error:
            faults.append(f"{name}: cannot be read: {error.strerror}")
            continue
        if sha256 != listed[name]:
            faults.append(f"{name}: sha256 {sha256}, expected {listed[name]}")
    if faults:
        lines = "".join(f"\n  - {fault}" for fault in faults)
        raise CheckpointError(
            f"{folder}: {len(faults)} files are not as {SUMS_NAME} says:{lines}",
            hint="fetch or make these files again",
        )
    return len(listed)


def listed_sha256(folder: Path, name: str) -> str | None:
    """What SHA256SUMS of `folder`, if there is one, says of a file; other lines may be anything.

    Raises CheckpointError for a list that cannot be read.
    """
    path = folder / SUMS_NAME
    lines = _raw_sums(path).decode("utf-8", "replace").splitlines() if path.exists() else []
    matches = (_LINE.fullmatch(line) for line in lines)
    return next((match[1] for match in matches if match and match[2] == name), None)


def read_sums(path: Path) -> dict[str, str]:
    """Name -> sha256 of the list at `path`, which lists at least one file.

    Raises CheckpointError, for a line of another form or a name that stands twice too.
    """
    try:
        text = _raw_sums(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 at byte {error.start}") from None
    if text.startswith("\ufeff"):
        raise CheckpointError(f"{path}: begins with a byte order mark (bytes 0 to 3)")
    listed: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{path}: line {number} is not a sha256, two spaces and a name")
        if match[2] in listed:
            first = list(listed).index(match[2]) + 1
            raise CheckpointError(f"{path}: line {number} lists {match[2]!r} as line {first} does")
        listed[match[2]] = match[1]
    if not listed:
        raise CheckpointError(f"{path}: lists no file")
    return listed


def _raw_sums(path: Path) -> bytes:
    try:
        require_regular(path)
        with path.open("rb") as file:
            raw = file.read(MAX_SUMS_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_SUMS_BYTES:
        raise CheckpointError(f"{path}: longer than the limit of {MAX_SUMS_BYTES} bytes")
    return raw


def _raise(error: OSError) -> None:
    raise error


def visible_files(folder: Path, on_error: Callable[[OSError], None] = _raise) -> set[str]:
    """Every file under `folder` that belongs to the checkpoint, by its name relative to it.

    A link that leads nowhere is one. on_error: is told of a folder that cannot be listed.
    """
    found = set()
    for place, folders, names in os.walk(folder, onerror=on_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        here = Path(place).relative_to(folder)
        found |= {(here / name).as_posix() for name in names if not name.startswith(".")}
    return found
