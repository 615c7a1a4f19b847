"""Read a whole folder of weights and say which files, and in them which tensors, are not as they
should be.

What a folder's bytes are compared with is what it has: SHA256SUMS (files), tensors.sha256.json
(tensors), both or neither; headers, sizes and index are checked always. Where files are missing or
cut the others are compared all the same. Knows no torch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from emberbox.errors import CheckpointError
from emberbox.store.checkpoint import INDEX_NAME, MTP_FOLDER, open_checkpoint, read_index
from emberbox.store.checksums import (
    SUMS_NAME,
    OnBytes,
    digest_file,
    listed_sha256,
    read_sums,
    require_regular,
    visible_files,
)
from emberbox.store.digests import DIGESTS_NAME, digest_shard, listed_digests, misfits
from emberbox.store.safetensors_header import TensorInfo, read_header

MAX_NAMES = 10  # in one list; a download that broke off lacks thousands of tensors


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one file, by its name in the folder ("" for the folder as a whole).

    what: in words, with at most MAX_NAMES names.
    """

    file: str
    what: str
    tensors: tuple[str, ...] = ()  # whose bytes are not what they should be


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was compared, and what was found.

    num_files: compared with SHA256SUMS. num_tensors: compared with their digests. unknown: what
    could not be compared, and why, in words.
    """

    num_files: int
    num_tensors: int
    faults: tuple[Fault, ...]
    unknown: tuple[str, ...]


def verify_folder(folder: Path, on_bytes: OnBytes = lambda _: None) -> Verdict:
    """Read every file of `folder` that something can be compared with.

    Raises CheckpointError if there is no such folder or it cannot be read; everything else that is
    wrong is a Fault.
    """
    try:
        is_folder = folder.is_dir()
    except OSError as error:
        raise CheckpointError(f"{folder}: {_reason(error)}") from error
    if not is_folder:
        raise CheckpointError(f"{folder}: no such folder", hint="give the folder of config.json")
    return _Verification(folder, on_bytes).verdict()


def num_bytes_of(folder: Path) -> int:
    """Of all files that belong to the checkpoint and can be read, for a progress bar."""
    return sum(_size(folder / name) for name in visible_files(folder, lambda _: None))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a link that leads nowhere: a fault, not a reason to stop
        return 0


class _Verification:
    def __init__(self, folder: Path, on_bytes: OnBytes) -> None:
        self.folder, self.on_bytes = folder, on_bytes
        self.faults: list[Fault] = []
        self.names = visible_files(folder, self._cannot_list)
        self.num_files = self.num_tensors = 0
        self.without_digests: Counter[str] = Counter()  # why -> number of tensors
        self.sums = self._sums()
        self.digests: dict[str, str] = {}

    def verdict(self) -> Verdict:
        headers = dict(self._headers())
        self._read_digests(headers)
        known = self.sums.keys() & self.names
        self.faults += [
            Fault(name, f"listed in {SUMS_NAME}, but not there")
            for name in sorted(self.sums.keys() - self.names)
            if not any(self._is_told(parent.as_posix()) for parent in Path(name).parents)
        ]
        for name in sorted(known | headers.keys()):
            self._file(name, headers.get(name, []))
        for name in sorted(self.names - self.sums.keys() - {SUMS_NAME}):
            self._unlisted(name)
        try:
            open_checkpoint(self.folder, verify=False)
        except CheckpointError as problem:
            if not any(fault.what == problem.message for fault in self.faults):
                self.faults.append(Fault("", problem.message))
        capped = (replace(fault, what=_capped(fault.what)) for fault in self.faults)
        faults = tuple(sorted(capped, key=lambda fault: fault.file))
        return Verdict(self.num_files, self.num_tensors, faults, tuple(self._unknown(headers)))

    def _sums(self) -> dict[str, str]:
        if not self._is_there(SUMS_NAME):
            return {}
        try:
            return read_sums(self.folder / SUMS_NAME)
        except CheckpointError as problem:
            self.faults.append(Fault(SUMS_NAME, problem.message))
            return {}

    def _headers(self) -> Iterator[tuple[str, list[TensorInfo]]]:
        """The tensors of every shard whose header is good; the others are faults."""
        for name in sorted(self.names):
            if name.endswith(".safetensors"):
                try:
                    yield name, list(read_header(self.folder / name).values())
                except CheckpointError as problem:
                    self.faults.append(Fault(name, problem.message))

    def _read_digests(self, headers: Mapping[str, list[TensorInfo]]) -> None:
        """Of the tensors that are there; that others are listed is a fault of the list."""
        for part in ("", MTP_FOLDER):
            place = self.folder / part
            name = (Path(part) / DIGESTS_NAME).as_posix()
            names = {i.name for infos in headers.values() for i in infos if i.file.parent == place}
            if not (self._is_there(name) or (names and name in self.sums)):
                self.without_digests[f"no {DIGESTS_NAME}"] += len(names)
                continue
            try:
                listed = listed_digests(place / DIGESTS_NAME, self._sha256_of(name))
            except (OSError, CheckpointError) as error:
                self.faults.append(Fault(name, _reason(error)))
                self.without_digests[f"{name} could not be used"] += len(names)
                continue
            self.digests |= {n: digest for n, digest in listed.items() if digest and n in names}
            unread = {
                path.name
                for path in map(self.folder.joinpath, self.names - headers.keys())
                if path.parent == place and path.suffix == ".safetensors"
            }
            lost = _lost(place, unread, listed)
            if wrong := misfits(listed, names | (listed.keys() & lost)):
                lines = [_of_tensors(each, what) for what, each in wrong.items()]
                text = f"does not fit the tensors beside it: {_lines(lines)}"
                self.faults.append(Fault(name, text))

    def _file(self, name: str, infos: list[TensorInfo]) -> None:
        """Compare one file as a whole, and each tensor in it."""
        path, expected = self.folder / name, self.sums.get(name)
        try:
            if infos:
                sha256, found = digest_shard(path, infos, self.on_bytes)
            else:
                sha256, found = digest_file(path, self.on_bytes).sha256, {}
        except (OSError, CheckpointError) as error:
            if not self._is_told(name):
                self.faults.append(Fault(name, _reason(error)))
            return
        self.num_files += expected is not None
        compared = found.keys() & self.digests.keys()
        self.num_tensors += len(compared)
        differing = [i for i in infos if found[i.name] != self.digests.get(i.name, found[i.name])]
        if differing:
            what = _damaged(differing, is_file_good=expected == sha256)
            self.faults.append(Fault(name, what, tuple(info.name for info in differing)))
        elif expected not in (None, sha256) and not self._is_told(name):
            self.faults.append(Fault(name, _changed(sha256, str(expected), infos, compared)))

    def _unlisted(self, name: str) -> None:
        """A file that SHA256SUMS, if there is one, does not list."""
        try:
            require_regular(self.folder / name)
        except OSError as error:
            if not self._is_told(name):
                self.faults.append(Fault(name, _reason(error)))
        if self.sums:
            self.faults.append(Fault(name, f"there, but not listed in {SUMS_NAME}"))

    def _cannot_list(self, error: OSError) -> None:
        name = Path(error.filename or self.folder).relative_to(self.folder).as_posix()
        if name == ".":
            raise CheckpointError(f"{self.folder}: {_reason(error)}") from error
        self.faults.append(Fault(name, _reason(error)))

    def _is_there(self, name: str) -> bool:
        try:
            return name in self.names or (self.folder / name).is_dir()
        except OSError:  # in a folder that cannot be read, which is told
            return False

    def _sha256_of(self, name: str) -> str | None:
        """What SHA256SUMS says of a file; nothing where it cannot be read, which is told."""
        try:
            return listed_sha256(self.folder, name)
        except CheckpointError:
            return None

    def _is_told(self, name: str) -> bool:
        return any(fault.file == name for fault in self.faults)

    def _unknown(self, headers: Mapping[str, list[TensorInfo]]) -> Iterator[str]:
        sums = f"no {SUMS_NAME}"
        if self._is_there(SUMS_NAME):
            sums = f"{SUMS_NAME} could not be used"
        if not self.sums:
            yield f"{sums}: files beside the weights"
        total = sum(map(len, headers.values()))
        for why, rest in self.without_digests.items():
            if rest and self.sums:
                yield f"{why}: which tensors of a file are damaged"
            elif rest:
                both = f"{sums} and {why}".replace(
                    f"no {SUMS_NAME} and no ", f"neither {SUMS_NAME} nor "
                )
                yield (
                    f"{both}: the bytes of {rest} of {total} tensors; "
                    "a changed byte in them is not seen"
                )


def _reason(error: OSError | CheckpointError) -> str:
    if isinstance(error, CheckpointError):
        return error.message
    return f"cannot be read: {error.strerror}"


def _lost(place: Path, unread: set[str], listed: Mapping[str, str | None]) -> set[str]:
    """Tensors of the files in `unread`, whose headers are bad: that is told, and once is enough."""
    try:
        shards = read_index(place / INDEX_NAME)
    except CheckpointError:  # without an index whatever is missing may be in them
        return set(listed) if unread else set()
    return {name for name, shard in shards.items() if shard in unread}


def _damaged(differing: list[TensorInfo], *, is_file_good: bool) -> str:
    word = (
        f"does not fit its digest, but {SUMS_NAME} fits the file" if is_file_good else "is damaged"
    )
    lines = [f"tensor {i.name!r} {word} (bytes {i.start} to {i.stop})" for i in differing]
    return _lines(lines)


def _lines(lines: list[str]) -> str:
    return lines[0] if len(lines) == 1 else "".join(f"\n    - {line}" for line in lines)


def _of_tensors(names: list[str], what: str) -> str:
    """One line of a fault that many tensors share."""
    if len(names) == 1:
        return f"tensor {names[0]!r} {what}"
    rest = f", and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return f"{len(names):,} tensors: each {what}: {', '.join(names[:MAX_NAMES])}{rest}"


def _capped(text: str) -> str:
    """The same with no list of more than MAX_NAMES lines."""
    lines = text.split("\n")
    items = [number for number, line in enumerate(lines) if line.lstrip().startswith("- ")]
    rest = items[MAX_NAMES:]
    if not rest:
        return text
    indent = lines[rest[0]].partition("- ")[0]
    kept = [line for number, line in enumerate(lines) if number not in set(rest)]
    return "\n".join([*kept, f"{indent}- and {len(rest):,} more"])


def _changed(sha256: str, expected: str, infos: list[TensorInfo], compared: set[str]) -> str:
    """A file that differs where no tensor is known to."""
    text = f"sha256 {sha256}, expected {expected}"
    if infos and len(compared) == len(infos):
        start = min(info.start for info in infos)
        return f"{text}: every tensor is good, so its header is changed (bytes 0 to {start})"
    if infos:
        return f"{text}: one or more of its {len(infos)} tensors, or its header, are damaged"
    return text
