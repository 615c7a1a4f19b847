"""Read a shard that was just written and compare it with what was handed in. Knows no torch."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from emberbox.errors import CheckpointError
from emberbox.store.buffers import Buffer, byte_view
from emberbox.store.checksums import FileDigest, hash_next
from emberbox.store.safetensors_header import read_header


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """A tensor as it was handed in."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


def digest_tensor(dtype: str, shape: tuple[int, ...], data: Buffer) -> TensorDigest:
    """`data` are the row-major bytes."""
    return TensorDigest(dtype, tuple(shape), hashlib.sha256(byte_view(data)).hexdigest())


def read_back(path: Path, expected: Mapping[str, TensorDigest]) -> tuple[FileDigest, list[str]]:
    """Compare every tensor in the file at `path` with `expected[name]`, in one pass over the disk.

    Returns what the whole file holds, and the names in it. Raises CheckpointError with the tensor
    that differs, the HeaderError family, or OSError.
    """
    infos = read_header(path)
    whole = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # else it would be read from memory, not from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        position = min((info.start for info in infos.values()), default=0)
        hash_next(file, position, [whole])
        for info in infos.values():
            part = hashlib.sha256()
            hash_next(file, info.num_bytes, [whole, part])
            position = info.stop
            found = TensorDigest(info.dtype, info.shape, part.hexdigest())
            if found != expected.get(info.name):
                raise CheckpointError(
                    f"{path}: tensor {info.name!r} reads back as {found}, "
                    f"written was {expected.get(info.name)}",
                    hint="the disk or its driver is at fault",
                )
    return FileDigest(position, whole.hexdigest()), list(infos)


def read_folder_back(folder: Path, expected: Mapping[str, TensorDigest]) -> dict[str, FileDigest]:
    """`read_back` of all shards in `folder`, which must hold every tensor of `expected`."""
    files: dict[str, FileDigest] = {}
    missing = set(expected)
    for path in sorted(folder.glob("*.safetensors")):
        files[path.name], names = read_back(path, expected)
        missing.difference_update(names)
    if missing:
        raise CheckpointError(f"{folder}: tensor {min(missing)!r} does not read back")
    return files
