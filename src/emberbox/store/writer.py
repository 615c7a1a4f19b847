"""Write a folder of safetensors shards so that a reader sees all of it or is refused.

Tensors arrive one at a time and go to a temporary file at once; memory holds names only. A shard
is composed when it is full: a header cannot be sized before its tensors are known, and the widest
dtypes go first so that every tensor is aligned to its element, which readers that map the file
rely on. That copy stays inside one machine's page cache. Nothing has its final name before `close`,
and the index is the last to get one. Knows no torch.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from emberbox.errors import (
    CheckpointError,
    DuplicateName,
    EnvironmentProblem,
    HeaderSyntax,
    HeaderTooLarge,
    UnknownDtype,
    WrongSize,
)
from emberbox.store.buffers import Buffer, byte_view
from emberbox.store.checkpoint import INDEX_NAME
from emberbox.store.durable import disk_problems, flush_file, flush_folder, write_file
from emberbox.store.safetensors_header import (
    DTYPE_BITS,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    METADATA_KEY,
    num_data_bytes,
)

SINGLE_NAME = "model.safetensors"
ALIGNMENT = 8  # of the data section
COPY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    position: int  # in the temporary file


@dataclass(frozen=True, slots=True)
class _Shard:
    """A composed file under its temporary name."""

    path: Path
    names: tuple[str, ...]


class CheckpointWriter:
    """Context manager: `add` tensors; leaving it closes. An exception inside removes every trace.

    A shard holds at most `max_shard_bytes` of tensor data, or one larger tensor. One shard becomes
    model.safetensors, several model-00001-of-0000N.safetensors and an index. config.json and
    tokenizer files are the caller's.
    """

    def __init__(self, folder: Path, max_shard_bytes: int, *, overwrite: bool = False) -> None:
        """Create `folder` if need be. Raises CheckpointError if weights are there already.

        With `overwrite` they stay until close has put the new files in their place.
        """
        if max_shard_bytes <= 0:
            raise ValueError(f"max_shard_bytes is {max_shard_bytes}, expected a positive number")
        self._folder = folder
        self._max_shard_bytes = max_shard_bytes
        self._tag = secrets.token_hex(4)
        self._names: set[str] = set()
        self._entries: list[_Entry] = []
        self._entry_bytes = 0
        self._shards: list[_Shard] = []
        self._total_bytes = 0
        self._is_closed = False
        old = _weight_files(folder)
        if old and not overwrite:
            raise CheckpointError(
                f"{folder}: holds weights already ({old[0].name}, {len(old)} files in all)",
                hint="choose another folder, or ask to overwrite",
            )
        with disk_problems(self._folder):
            self._is_new_folder = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            self._data: BinaryIO = self._temporary("data").open("w+b")

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: Buffer) -> None:
        """Append a tensor: `dtype` a safetensors tag, `data` its row-major bytes, little-endian.

        The data is on its way to disk when this returns; the buffer may be reused. Raises
        DuplicateName, UnknownDtype, WrongSize, HeaderSyntax (a name that cannot be stored) or
        EnvironmentProblem (disk).
        """
        if self._is_closed:
            raise ValueError("the writer is closed")
        view = byte_view(data)
        self._check(name, dtype, shape, view.nbytes)
        with disk_problems(self._folder):
            if self._entries and self._entry_bytes + view.nbytes > self._max_shard_bytes:
                self._finish_shard()
            self._data.seek(self._entry_bytes)  # a write that failed may have moved it
            self._data.write(view)
        self._entries.append(_Entry(name, dtype, tuple(shape), view.nbytes, self._entry_bytes))
        self._names.add(name)
        self._entry_bytes += view.nbytes
        self._total_bytes += view.nbytes

    def close(self) -> None:
        """Give every file its final name, the index last. Raises CheckpointError without tensors.

        If anything fails, nothing that this writer wrote is left.
        """
        if self._is_closed:
            return
        moves: list[tuple[Path, Path]] = []
        try:
            with disk_problems(self._folder):
                self._finish_shard()
                self._place(moves)
        except BaseException:
            for source, target in reversed(moves):
                target.replace(source)
            self.discard()
            raise
        self._is_closed = True
        self._remove_temporaries()

    def discard(self) -> None:
        """Remove all that was written, and the folder if this writer made it. Weights that were
        there before stay.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._remove_temporaries()
        if self._is_new_folder and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _check(self, name: str, dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
        where = f"{self._folder}: tensor {name!r}"
        if name in self._names:
            raise DuplicateName(f"{where}: added twice")
        if name == METADATA_KEY or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise HeaderSyntax(f"{where}: not a name that the format can store")
        if dtype not in DTYPE_BITS:
            raise UnknownDtype(f"{where}: dtype {dtype!r}, expected one of {', '.join(DTYPE_BITS)}")
        expected = num_data_bytes(dtype, tuple(shape))
        if any(size < 0 for size in shape) or expected != num_bytes:
            raise WrongSize(
                f"{where}: {dtype} of shape {list(shape)} needs {expected} bytes, got {num_bytes}"
            )

    def _finish_shard(self) -> None:
        """Compose header and data of the tensors so far, and start the next shard."""
        if not self._entries:
            raise CheckpointError(f"{self._folder}: no tensor was added")
        entries = sorted(self._entries, key=lambda entry: -DTYPE_BITS[entry.dtype])
        header = _header(entries)
        if len(header) > MAX_HEADER_BYTES:
            raise HeaderTooLarge(
                f"{self._folder}: {len(entries)} names make a header of {len(header)} bytes, the "
                f"limit is {MAX_HEADER_BYTES}",
                hint="lower max_shard_bytes",
            )
        path = self._temporary(f"{len(self._shards) + 1:05d}")
        with path.open("wb") as file:
            file.write(len(header).to_bytes(LENGTH_BYTES, "little"))
            file.write(header)
            for entry in entries:
                self._copy(entry, file)
            flush_file(file)
        self._shards.append(_Shard(path, tuple(entry.name for entry in entries)))
        self._data.truncate(0)
        self._entries, self._entry_bytes = [], 0

    def _copy(self, entry: _Entry, file: BinaryIO) -> None:
        self._data.seek(entry.position)
        remaining = entry.num_bytes
        while remaining:
            chunk = self._data.read(min(remaining, COPY_BYTES))
            if not chunk:
                raise EnvironmentProblem(f"{self._folder}: a temporary file lost its data")
            file.write(chunk)
            remaining -= len(chunk)

    def _place(self, moves: list[tuple[Path, Path]]) -> None:
        """Rename old weights away, shards and then the index into place; `moves` says what is done.

        Old index first: from there to the last rename a reader finds shards without an index.
        """
        finals = [SINGLE_NAME] if len(self._shards) == 1 else shard_names(len(self._shards))
        renames = [(old, self._temporary(f"old-{old.name}")) for old in _weight_files(self._folder)]
        renames += [
            (shard.path, self._folder / final)
            for shard, final in zip(self._shards, finals, strict=True)
        ]
        if len(finals) > 1:
            index = self._temporary("index")
            write_file(index, [self._index(finals)])
            renames.append((index, self._folder / INDEX_NAME))
        for source, target in renames:
            source.replace(target)
            moves.append((source, target))
        flush_folder(self._folder)

    def _index(self, finals: list[str]) -> bytes:
        pairs = zip(self._shards, finals, strict=True)
        weight_map = {name: final for shard, final in pairs for name in shard.names}
        return index_json(weight_map, self._total_bytes)

    def _temporary(self, what: str) -> Path:
        return self._folder / f".emberbox-{self._tag}-{what}.partial"

    def _remove_temporaries(self) -> None:
        self._data.close()
        for path in self._folder.glob(f".emberbox-{self._tag}-*.partial"):
            path.unlink(missing_ok=True)


def shard_names(count: int) -> list[str]:
    """The usual names of `count` shards, in order."""
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index_json(weight_map: Mapping[str, str], num_bytes: int) -> bytes:
    """The index file: tensor name -> file name, and the bytes of all tensors."""
    index = {
        "metadata": {"total_size": num_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(index, indent=2) + "\n").encode()


def _weight_files(folder: Path) -> list[Path]:
    """Index and safetensors files of `folder`, the index first."""
    index = folder / INDEX_NAME
    return ([index] if index.exists() else []) + sorted(folder.glob("*.safetensors"))


def _header(entries: list[_Entry]) -> bytes:
    # transformers refuses files without this entry.
    header: dict[str, object] = {METADATA_KEY: {"format": "pt"}}
    start = 0
    for entry in entries:
        stop = start + entry.num_bytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return raw + b" " * (-(LENGTH_BYTES + len(raw)) % ALIGNMENT)
