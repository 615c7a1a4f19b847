"""The folder that a conversion writes, unit by unit; every crash leaves one to go on from.

    DST/compress.journal       what is complete (journal.py)
    DST/.partial/under-way/    shards of the unit that is being written
    DST/.partial/units/NAME/   shards of a unit, read back and compared; complete once journalled
    DST/.partial/states/NAME   what the caller needs to go on after that unit
    DST/.partial/files/        config, card and so on, before they get their names

`finish` gives everything its name in DST, the index last, so an unfinished folder is never
loadable. If `finish` is cut short, the next `Output` takes its moves back: there is one way to go
on. Knows tensors as bytes; knows no torch.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from emberbox.compress.disk import look, require_only, require_space
from emberbox.compress.journal import JOURNAL_NAME, FinishRecord, Job, Journal, UnitRecord
from emberbox.errors import CheckpointError, DuplicateName, EnvironmentProblem, WrongSize
from emberbox.store.buffers import Buffer, byte_view
from emberbox.store.checkpoint import CONFIG_NAME, INDEX_NAME
from emberbox.store.checksums import (
    READ_BYTES,
    SUMS_NAME,
    FileDigest,
    require_digest,
    sums_text,
)
from emberbox.store.digests import DIGESTS_NAME, digests_json, shortened
from emberbox.store.durable import disk_problems, flush_folder, remove, write_file
from emberbox.store.read_back import TensorDigest, digest_tensor, read_folder_back
from emberbox.store.safetensors_header import read_header
from emberbox.store.writer import CheckpointWriter, index_json, shard_names

WORK_NAME = ".partial"
CARD_NAME = "README.md"

OnProgress = Callable[[int, int], None]  # bytes read so far, bytes in all

log = logging.getLogger(__name__)


class Unit:
    """One unit that is being written; made by `Output.unit`."""

    def __init__(self, writer: CheckpointWriter, state: Path, taken: Mapping[str, str]) -> None:
        self.tensors: dict[str, TensorDigest] = {}
        self.num_bytes = 0
        self.state: FileDigest | None = None
        self.note: Mapping[str, Any] = {}  # journalled with the unit; anything that JSON holds
        self._writer = writer
        self._state = state
        self._taken = taken

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: Buffer) -> None:
        """Append a tensor, as `CheckpointWriter.add` does, with the same errors."""
        if name in self._taken:
            raise DuplicateName(f"tensor {name!r} is in unit {self._taken[name]} already")
        self._writer.add(name, dtype, shape, data)
        self.tensors[name] = digest_tensor(dtype, shape, data)
        self.num_bytes += byte_view(data).nbytes

    def save_state(self, buffers: Iterable[Buffer]) -> None:
        """Keep these bytes, one after the other, as what is needed to go on after this unit.

        They are written as they come; a second call replaces the first. Raises EnvironmentProblem.
        """
        with disk_problems(self._state.parent):
            self.state = write_file(self._state, buffers)


class Output:
    """Context manager: a locked folder. Leaving it releases the lock and leaves what is done."""

    def __init__(self, folder: Path, job: Job, journal: Journal) -> None:
        """Use `open`."""
        self.folder = folder
        self.job = job
        self._journal = journal
        self._work = folder / WORK_NAME
        self._units = self._work / "units"
        self._states = self._work / "states"
        self._tensors: dict[str, str] = {}  # tensor name -> unit

    @classmethod
    def open(
        cls,
        folder: Path,
        job: Job,
        *,
        source: Path,
        resume: bool,
        on_progress: OnProgress = lambda _done, _total: None,
    ) -> "Output":
        """Start in a new or empty folder, or with `resume` go on where a crash left one.

        Every complete unit is read and compared with its checksums; `on_progress` is told how far
        that is. A unit that does not fit is done again. Raises SettingsError (a folder inside
        `source`), EnvironmentProblem (permission, space, another process), CheckpointError (other
        files, another job, or a beginning and no `resume`).
        """
        look(folder, source, job, resume=resume)
        if not (folder / JOURNAL_NAME).exists():
            require_only(folder, frozenset(), "choose a new or an empty folder")
        with disk_problems(folder):
            folder.mkdir(parents=True, exist_ok=True)
            flush_folder(folder.parent)
            output = cls(folder, job, Journal(folder / JOURNAL_NAME, job))
            try:
                output._recover(on_progress)
            except BaseException:
                output.close()
                raise
        return output

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def done(self) -> frozenset[str]:
        """The units that are complete and verified."""
        return frozenset(self._journal.units)

    @contextmanager
    def unit(self, name: str) -> Iterator[Unit]:
        """Write the unit `name`: on leaving, its shards are on disk, compared and journalled.

        An exception inside leaves nothing of it. Raises WrongSize if the tensors do not take the
        bytes that the job says, CheckpointError if they do not read back as they were handed in,
        EnvironmentProblem (disk). ValueError for a name that is not in the job, or done.
        """
        if name not in self.job.unit_bytes or name in self.done:
            raise ValueError(f"unit {name!r} is done or not in the job")
        under_way, state = self._work / "under-way", self._work / "state"
        try:
            with CheckpointWriter(under_way, self.job.max_shard_bytes) as writer:
                unit = Unit(writer, state, self._tensors)
                yield unit
                self._require_planned_bytes(name, unit)
            with disk_problems(self.folder):
                files = read_folder_back(under_way, unit.tensors)
                tensors = {n: shortened(found.sha256) for n, found in unit.tensors.items()}
                record = UnitRecord(files, tensors, unit.state, unit.note)
                self._keep(name, record)
        except BaseException:
            paths = [under_way, state] + ([] if name in self.done else [self._units / name])
            with suppress(OSError):
                for path in paths:
                    remove(path)
            raise

    def note(self, name: str) -> Mapping[str, Any]:
        """What was noted with a unit that is done."""
        return self._journal.units[name].note

    def state(self, name: str) -> Path | None:
        """The file that `save_state` wrote with the unit `name`, compared with its checksum.

        None if there is none that fits: never saved, replaced by that of a later unit, missing or
        damaged (a warning says so). The file stays until the next state is kept.
        """
        if name != self._journal.newest_state or not (kept := self._journal.units[name].state):
            return None
        path = self._states / name
        try:
            require_digest(path, kept)
        except CheckpointError as problem:
            log.warning("%s: the state after unit %s is damaged", problem, name)
            return None
        return path

    def finish(
        self, config: Mapping[str, object], extra_files: Mapping[str, bytes | Path], card: str
    ) -> None:
        """Give everything its final name, write config, card, digests, SHA256SUMS and index; close.

        `extra_files` are bytes, or files to copy, by their names in the folder. ValueError if a
        unit is missing or a name is taken; EnvironmentProblem (disk): open again and finish again.
        """
        others: dict[str, bytes | Path] = {
            CONFIG_NAME: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
            CARD_NAME: card.encode(),
            DIGESTS_NAME: self._digests(),
        }
        missing = [name for name in self.job.unit_bytes if name not in self.done]
        bad = [name for name in extra_files if name in others or not _is_free_name(name)]
        if missing or bad:
            raise ValueError(f"units that are not done: {missing}; names that are taken: {bad}")
        others |= extra_files
        with disk_problems(self.folder):
            self._require_only_ours()
            record = FinishRecord(self._final_shards(), (*others, SUMS_NAME))
            index = self._index(record)
            self._journal.add_finish(record)
            self._place(record, others, index)
            remove(self._work)
            self._journal.remove()
            flush_folder(self.folder)

    def close(self) -> None:
        """Release the lock."""
        self._journal.close()

    # -- units ------------------------------------------------------------------------------------

    def _require_planned_bytes(self, name: str, unit: Unit) -> None:
        planned = self.job.unit_bytes[name]
        if unit.num_bytes != planned:
            raise WrongSize(
                f"{self.folder}: unit {name!r} has {unit.num_bytes} bytes of tensors, "
                f"the plan says {planned}"
            )

    def _keep(self, name: str, record: UnitRecord) -> None:
        """Move what is under way to its place, then journal it; then the old state may go."""
        if record.state:
            (self._work / "state").replace(self._states / name)
            flush_folder(self._states)
        (self._work / "under-way").replace(self._units / name)
        flush_folder(self._units)
        self._journal.add_unit(name, record)
        self._tensors.update(dict.fromkeys(record.tensors, name))
        if record.state:
            self._remove_states_but(name)

    def _remove_states_but(self, name: str | None) -> None:
        for path in list(self._states.iterdir()):
            if path.name != name:
                path.unlink()

    # -- going on ---------------------------------------------------------------------------------

    def _recover(self, on_progress: OnProgress) -> None:
        """Bring the folder to what the journal says, and forget units that do not fit it."""
        for folder in (self._work, self._units, self._states, self._work / "files"):
            folder.mkdir(exist_ok=True)
        self._take_back()
        self._require_only_ours()
        for path in list(self._work.iterdir()):
            if path.name not in ("units", "states", "files"):
                remove(path)
        for path in list(self._units.iterdir()):
            if path.name not in self.done:
                remove(path)
        self._remove_states_but(self._journal.newest_state)
        self._verify(on_progress)
        rest = {name: size for name, size in self.job.unit_bytes.items() if name not in self.done}
        kept_bytes = sum(path.stat().st_size for path in self._states.iterdir())
        _require_space(self.folder, self.job, rest, kept_bytes)

    def _take_back(self) -> None:
        """Undo what a `finish` that was cut short has put into the folder, the index first."""
        record = self._journal.finish
        if record is None:
            return
        (self.folder / INDEX_NAME).unlink(missing_ok=True)
        flush_folder(self.folder)
        for name in record.others:
            (self.folder / name).unlink(missing_ok=True)
        for final, (unit, file) in record.shards.items():
            if (self.folder / final).exists():
                (self._units / unit).mkdir(exist_ok=True)
                (self.folder / final).replace(self._units / unit / file)
        flush_folder(self.folder)

    def _verify(self, on_progress: OnProgress) -> None:
        """Read the files of every complete unit; forget and remove a unit that does not fit."""
        units = dict(self._journal.units)
        total = sum(file.num_bytes for unit in units.values() for file in unit.files.values())
        num_read = 0

        def on_bytes(count: int) -> None:
            nonlocal num_read
            num_read += count
            on_progress(num_read, total)

        for name, record in units.items():
            paths = [self._units / name / file for file in record.files]
            try:
                for path in paths:
                    require_digest(path, record.files[path.name], on_bytes)
                self._tensors |= dict.fromkeys(record.tensors, name)
            except CheckpointError as problem:
                log.warning("%s: unit %s is damaged and will be done again", problem, name)
                self._journal.forget(name)
                remove(self._units / name)

    # -- finishing --------------------------------------------------------------------------------

    def _require_only_ours(self) -> None:
        require_only(self.folder, frozenset((JOURNAL_NAME, WORK_NAME)), "move them away and resume")

    def _final_shards(self) -> dict[str, tuple[str, str]]:
        units = self._journal.units
        places = [(unit, file) for unit in self.job.unit_bytes for file in units[unit].files]
        return dict(zip(shard_names(len(places)), places, strict=True))

    def _digests(self) -> bytes:
        units = self._journal.units.values()
        return digests_json({name: d for unit in units for name, d in unit.tensors.items()})

    def _index(self, record: FinishRecord) -> bytes:
        weight_map: dict[str, str] = {}
        for final, (unit, file) in record.shards.items():
            weight_map |= dict.fromkeys(read_header(self._units / unit / file), final)
        return index_json(weight_map, sum(self.job.unit_bytes.values()))

    def _place(
        self, record: FinishRecord, others: Mapping[str, bytes | Path], index: bytes
    ) -> None:
        """Everything to its final name; the index is the last that a loader needs."""
        sums = {name: self._put(name, content) for name, content in others.items()}
        for final, (unit, file) in record.shards.items():
            (self._units / unit / file).replace(self.folder / final)
            sums[final] = self._journal.units[unit].files[file].sha256
        sums[INDEX_NAME] = hashlib.sha256(index).hexdigest()
        self._put(SUMS_NAME, sums_text(sums).encode())
        flush_folder(self.folder)
        self._put(INDEX_NAME, index)
        flush_folder(self.folder)

    def _put(self, name: str, content: bytes | Path) -> str:
        """Write a file under a temporary name, rename it, return its sha256."""
        temporary = self._work / "files" / name
        digest = write_file(temporary, _chunks(content))
        temporary.replace(self.folder / name)
        return digest.sha256


def _require_space(folder: Path, job: Job, rest: Mapping[str, int], kept_bytes: int) -> None:
    """Raises EnvironmentProblem if the units in `rest` and their states do not fit on the disk."""
    require_space(
        folder,
        output_bytes=sum(rest.values()),
        unit_bytes=max(rest.values(), default=0),
        state_bytes=max(0, 2 * job.state_bytes - kept_bytes) if rest else 0,
    )


def _chunks(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    try:
        with content.open("rb") as file:
            while chunk := file.read(READ_BYTES):
                yield chunk
    except OSError as error:
        raise EnvironmentProblem(f"{content}: cannot be read: {error.strerror}") from error


def _is_free_name(name: str) -> bool:
    is_bare = name != "" and Path(name).name == name and name.isprintable() and "\\" not in name
    is_ours = name in (INDEX_NAME, SUMS_NAME, JOURNAL_NAME) or name.endswith(".safetensors")
    return is_bare and not is_ours and not name.startswith(".")
