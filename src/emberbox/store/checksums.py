"""SHA256SUMS: what every file of a checkpoint folder should be, in the format of `sha256sum -c`.

A line is `<64 hex digits>  <name>`, sorted by name, for every file but the list itself. Hidden
files and folders (what version control and download tools leave) are not part of a checkpoint.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from emberbox.errors import CheckpointError

SUMS_NAME = "SHA256SUMS"
READ_BYTES = 4 << 20

OnBytes = Callable[[int], None]  # is told how many more bytes were read

# The star is what `sha256sum --binary` writes.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?([^\\\n]+)")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file holds, in few bytes."""

    num_bytes: int
    sha256: str  # 64 hex digits


def digest_file(path: Path, on_bytes: OnBytes = lambda _: None) -> FileDigest:
    """Read `path` to its end. Raises OSError."""
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
    found = visible_files(folder) - {SUMS_NAME}
    faults = [f"{name}: listed, but not there" for name in sorted(listed.keys() - found)]
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
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    matches = (_LINE.fullmatch(line) for line in lines)
    return next((match[1] for match in matches if match and match[2] == name), None)


def read_sums(path: Path) -> dict[str, str]:
    """Name -> sha256 of the list at `path`. Raises CheckpointError for a line of another form."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    listed: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in listed:
            raise CheckpointError(
                f"{path}: line {number} is not a sha256, two spaces and a new name"
            )
        listed[match[2]] = match[1]
    return listed


def visible_files(folder: Path) -> set[str]:
    """Every file under `folder` that belongs to the checkpoint, by its name relative to it."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return {name.as_posix() for name in names if not any(p.startswith(".") for p in name.parts)}
