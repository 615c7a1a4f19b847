"""The folder of a tuned model: the candidate's, byte for byte, but for the tensors that were tuned.

Shards keep names, headers and order. Everything is written beside DST under a temporary name, read
back, compared, and renamed as a whole, so a DST is complete or not there. Knows no torch.
"""

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from emberbox.compress.disk import require_apart, require_space, require_writable
from emberbox.errors import CheckpointError, EnvironmentProblem, SettingsError
from emberbox.measure.documents import canonical_json
from emberbox.store.checkpoint import Checkpoint
from emberbox.store.checksums import READ_BYTES, SUMS_NAME, sums_text
from emberbox.store.digests import DIGESTS_NAME, digests_json, shortened
from emberbox.store.durable import disk_problems, flush_folder, remove, write_file
from emberbox.store.read_back import TensorDigest, digest_tensor, read_back
from emberbox.store.safetensors_header import TensorInfo

log = logging.getLogger(__name__)

MAX_NAME_BYTES = 237  # a draft's name is longer by 18

OnBytes = Callable[[int, int], None]  # bytes written and compared so far, in all


@dataclass(frozen=True, slots=True)
class Contents:
    """What takes the place of the candidate's own.

    tensors: name -> new bytes of the same size. documents: file name -> bytes, from the digest of
    the candidate's tensors; these files are new or replaced.
    """

    tensors: Mapping[str, bytes]
    documents: Callable[[str], Mapping[str, bytes]]


def check_place(candidate: Checkpoint, reference: Path, folder: Path) -> None:
    """See that DST can be written, before any work. Raises SettingsError, CheckpointError,
    EnvironmentProblem."""
    if (size := len(os.fsencode(folder.name))) > MAX_NAME_BYTES:
        raise SettingsError(
            f"{folder}: a name of {size} bytes, expected at most {MAX_NAME_BYTES}",
            hint="give a shorter name",
        )
    with disk_problems(folder):
        for source in (candidate.folder, reference):
            require_apart(source, folder)
        _require_new(folder)
        require_writable(folder.parent)
        _tell_of_drafts(folder)
    num_bytes = sum(path.stat().st_size for path in _files(candidate.folder))
    require_space(folder, output_bytes=num_bytes, unit_bytes=0, state_bytes=0)


def write_folder(
    candidate: Checkpoint,
    folder: Path,
    contents: Contents,
    on_bytes: OnBytes = lambda _done, _total: None,
) -> None:
    """Write `folder`. Raises CheckpointError (it appeared meanwhile, or does not read back),
    EnvironmentProblem (disk). Whatever is raised, nothing of it stays."""
    draft = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}.partial")
    with disk_problems(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.mkdir()
            _Writer(candidate, draft, contents, on_bytes).write()
            _require_new(folder)
            draft.rename(folder)
            flush_folder(folder.parent)
        except BaseException:
            remove(draft)
            raise


def _tell_of_drafts(folder: Path) -> None:
    """A log warning for each draft of `folder` that is there already."""
    name = re.compile(rf"\.{re.escape(folder.name)}-[0-9a-f]{{8}}\.partial")
    for path in sorted(folder.parent.iterdir()) if folder.parent.exists() else []:
        if name.fullmatch(path.name):
            log.warning("%s: left by a run that was killed; unless it still runs, remove it", path)


def _require_new(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise CheckpointError(
            f"{folder}: is there already; tuning writes a new folder",
            hint="give another name, or remove it",
        )


class _Writer:
    """Writes all files of a draft."""

    def __init__(
        self, candidate: Checkpoint, draft: Path, contents: Contents, on_bytes: OnBytes
    ) -> None:
        self._candidate, self._draft, self._contents = candidate, draft, contents
        self._on_bytes, self._done = on_bytes, 0
        self._files = sorted(_files(candidate.folder))
        self._total = sum(path.stat().st_size for path in self._files)
        self._sums: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        self._map: list[list[object]] = []  # as a receipt's map_sha256 is of

    def write(self) -> None:
        by_file: dict[Path, list[TensorInfo]] = {}
        for info in self._candidate.tensors.values():
            by_file.setdefault(info.file, []).append(info)
        for path in self._files:
            name = path.relative_to(self._candidate.folder).as_posix()
            if name in (SUMS_NAME, DIGESTS_NAME):  # of what CANDIDATE holds
                continue
            target = self._draft / name
            target.parent.mkdir(parents=True, exist_ok=True)
            infos = sorted(by_file.get(path, ()), key=lambda info: (info.start, info.stop))
            write = self._shard if infos else self._copy
            self._sums[name] = write(path, target, infos)
        documents = self._contents.documents(self._digest())
        for name, data in documents.items():
            self._sums[name] = write_file(self._draft / name, [data]).sha256
        sums = write_file(self._draft / DIGESTS_NAME, [digests_json(self._digests)])
        self._sums[DIGESTS_NAME] = sums.sha256
        write_file(self._draft / SUMS_NAME, [sums_text(self._sums).encode()])
        for place in {(self._draft / name).parent for name in self._sums}:
            flush_folder(place)

    def _copy(self, path: Path, target: Path, _infos: list[TensorInfo]) -> str:
        with path.open("rb") as file:
            return write_file(target, self._told(iter(lambda: file.read(READ_BYTES), b""))).sha256

    def _shard(self, path: Path, target: Path, infos: list[TensorInfo]) -> str:
        """The file with its tuned tensors, compared after writing."""
        expected: dict[str, TensorDigest] = {}
        written = write_file(target, self._told(self._pieces(path, infos, expected)))
        found, _ = read_back(target, expected)
        if found.sha256 != written.sha256:
            raise CheckpointError(f"{target}: does not read back", hint="the disk is at fault")
        return found.sha256

    def _pieces(
        self, path: Path, infos: list[TensorInfo], expected: dict[str, TensorDigest]
    ) -> Iterator[bytes]:
        """Header and tensors one after another; what each should be goes to `expected`."""
        position = 0
        with path.open("rb") as file:
            for info in infos:
                yield _exactly(file.read(info.start - position), info.start - position, path)
                old = _exactly(file.read(info.num_bytes), info.num_bytes, path)
                self._map.append(
                    [info.name, info.dtype, list(info.shape), hashlib.sha256(old).hexdigest()]
                )
                new = self._contents.tensors.get(info.name, old)
                if len(new) != len(old):
                    raise ValueError(f"{info.name}: {len(new)} bytes in place of {len(old)}")
                expected[info.name] = digest_tensor(info.dtype, info.shape, new)
                if path.parent == self._candidate.folder:
                    self._digests[info.name] = shortened(hashlib.sha256(new).hexdigest())
                yield new
                position = info.stop
            yield file.read()

    def _told(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            yield piece
            self._done += len(piece)
            self._on_bytes(self._done, self._total)

    def _digest(self) -> str:
        whole = sorted(self._map, key=lambda row: str(row[0]))
        return hashlib.sha256(canonical_json(whole)).hexdigest()


def _exactly(data: bytes, size: int, path: Path) -> bytes:
    if len(data) != size:
        raise CheckpointError(f"{path}: became shorter while it was read")
    return data


def _files(folder: Path) -> Iterator[Path]:
    """Every file but hidden ones and those in hidden folders. Raises EnvironmentProblem."""
    try:
        for path in folder.rglob("*"):
            parts = path.relative_to(folder).parts
            if path.is_file() and not any(part.startswith(".") for part in parts):
                yield path
    except OSError as error:
        raise EnvironmentProblem(f"{folder}: cannot be read: {error.strerror}") from error
