"""Write files that are whole or not there after a crash. Knows bytes and names; knows no torch.

The order that gives this: write under a temporary name, `flush_file`, rename, `flush_folder`.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from emberbox.errors import EnvironmentProblem
from emberbox.store.buffers import Buffer, byte_view
from emberbox.store.checksums import FileDigest


def write_file(path: Path, chunks: Iterable[Buffer]) -> FileDigest:
    """Write `chunks` one after the other to `path`, which is on disk when this returns.

    Returns what was handed in.
    """
    hasher, num_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            view = byte_view(chunk)
            file.write(view)
            hasher.update(view)
            num_bytes += view.nbytes
        flush_file(file)
    return FileDigest(num_bytes, hasher.hexdigest())


def flush_file(file: BinaryIO) -> None:
    """Wait until the data of `file` is on disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk: what was created, renamed or removed there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file, or a folder with all that is in it; what is not there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def disk_problems(folder: Path) -> Iterator[None]:
    """Turn an OSError inside into an EnvironmentProblem that names `folder`."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{folder}: cannot write: {error.strerror}",
            hint="check free space and permissions",
        ) from error
