"""What a conversion has finished: one line per fact, believed only if its checksum fits.

A line is 64 hex digits (sha256 of the rest), a space, a JSON object. The first says which job it
is, then one line per unit, and one when the folder is about to be finished. Lines are only ever
appended, and are on disk before `append` returns. From the first line that does not fit on,
the file is cut: a torn line costs the unit it was about. A process that works on the folder
holds a lock on the file, which the system releases however the process ends.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from emberbox.errors import CheckpointError, EnvironmentProblem
from emberbox.store.checksums import FileDigest
from emberbox.store.durable import flush_folder

JOURNAL_NAME = "compress.journal"
VERSION = 2

log = logging.getLogger(__name__)
_UNIT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What will be written, known before the first byte is. Two equal jobs write equal bytes.

    `unit_bytes`: bytes of tensor data per unit, in the order of the final shards. `state_bytes`:
    the most that one state takes. `about` explains `plan_digest` to a reader (recipe, source):
    it is not compared, but says what differs when the digest does.
    """

    plan_digest: str
    unit_bytes: Mapping[str, int]
    max_shard_bytes: int
    state_bytes: int = 0
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bad = [name for name in self.unit_bytes if not _UNIT_NAME.fullmatch(name)]
        if bad or not self.unit_bytes or self.max_shard_bytes <= 0:
            raise ValueError(f"units {bad or list(self.unit_bytes)}, {self.max_shard_bytes=}")


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """A unit that is complete: its files by name, and the state to go on from, if it has one.

    tensors: name -> digest (store/digests.py) of what was read back.
    note: what the writer of the unit wants to know again, as JSON holds it.
    """

    files: Mapping[str, FileDigest]
    tensors: Mapping[str, str]
    state: FileDigest | None
    note: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishRecord:
    """What `finish` puts into the folder: shards (final name -> unit and file), other names."""

    shards: Mapping[str, tuple[str, str]]
    others: tuple[str, ...]


class Journal:
    """The open, locked journal. `units` is in the order of completion; the newest is last."""

    def __init__(self, path: Path, job: Job) -> None:
        """Open or create `path`, lock it, and read what is done of `job`.

        Raises EnvironmentProblem if another process holds the lock, CheckpointError if it is the
        journal of another job or unreadable, OSError.
        """
        self.path = path
        self.units: dict[str, UnitRecord] = {}
        self.finish: FinishRecord | None = None
        self._file: IO[bytes] = path.open("r+b" if path.exists() else "x+b", buffering=0)
        try:
            self._lock()
            self._load(job)
        except BaseException:
            self._file.close()
            raise

    def add_unit(self, name: str, record: UnitRecord) -> None:
        """From now on the unit is done."""
        self._append({"unit": name, **asdict(record)})
        self.units[name] = record

    def add_finish(self, record: FinishRecord) -> None:
        """From now on these names in the folder are ours."""
        self._append({"finish": asdict(record)})
        self.finish = record

    def forget(self, name: str) -> None:
        """The unit is not there after all; a later `add_unit` replaces its line."""
        del self.units[name]

    @property
    def newest_state(self) -> str | None:
        """The last complete unit that has a state to go on from."""
        return next((name for name in reversed(self.units) if self.units[name].state), None)

    def close(self) -> None:
        """Release the lock."""
        self._file.close()

    def remove(self) -> None:
        """Delete the file: the folder is complete."""
        self.path.unlink()
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            is_ours = False
        else:  # the process that held the lock may just have finished and deleted the file
            opened = os.fstat(self._file.fileno())
            is_ours = self.path.exists() and os.path.samestat(self.path.stat(), opened)
        if not is_ours:
            raise EnvironmentProblem(
                f"{self.path.parent}: another process is writing to this folder",
                hint="wait for it, or end it",
            )

    def _load(self, job: Job) -> None:
        raw = self._file.read()
        records, self._end = _believed(raw)
        if records:
            _require_same(self.path, records[0], job)
            for record in records[1:]:
                self._take(record)
            if self._end < len(raw):
                log.warning("%s: cut after byte %d: a line is damaged", self.path, self._end)
        elif b"\n" in raw:  # its first line was complete once
            raise CheckpointError(
                f"{self.path}: the line that says what is written here is damaged",
                hint="remove the folder and start again",
            )
        else:
            self._append(_header(job))
            flush_folder(self.path.parent)

    def _take(self, record: dict[str, Any]) -> None:
        if "finish" in record:
            found, others = record["finish"]["shards"], record["finish"]["others"]
            names = [*found, *others, *(name for place in found.values() for name in place)]
            shards = {final: (unit, file) for final, (unit, file) in found.items()}
            self.finish = FinishRecord(shards, tuple(others))
        else:
            name, state = record["unit"], record["state"]
            files = {file: FileDigest(**digest) for file, digest in record["files"].items()}
            names = [name, *files]
            self.units.pop(name, None)  # done again: it counts from then on
            kept = FileDigest(**state) if state else None
            self.units[name] = UnitRecord(files, record["tensors"], kept, record["note"])
        if any(Path(name).name != name for name in names):  # nothing outside is ever touched
            raise CheckpointError(f"{self.path}: holds a path where a name should be: {names}")

    def _append(self, record: Mapping[str, object]) -> None:
        line = _line(record)
        self._file.truncate(self._end)  # what an append that failed may have left
        self._file.seek(self._end)
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())
        self._end += len(line)


def _header(job: Job) -> dict[str, object]:
    return {
        "journal": VERSION,
        "plan_digest": job.plan_digest,
        "unit_bytes": dict(job.unit_bytes),
        "max_shard_bytes": job.max_shard_bytes,
        "about": dict(job.about),
    }


def _line(record: Mapping[str, object]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n"


def _believed(raw: bytes) -> tuple[list[dict[str, Any]], int]:
    """The records up to the first line that does not fit, and how many bytes those lines take."""
    records, end = [], 0
    for line in raw.splitlines(keepends=True):
        digest, _, text = line.partition(b" ")
        text = text.removesuffix(b"\n")
        if not line.endswith(b"\n") or hashlib.sha256(text).hexdigest().encode() != digest:
            break
        records.append(json.loads(text))
        end += len(line)
    return records, end


def _require_same(path: Path, there: Mapping[str, Any], job: Job) -> None:
    asked = json.loads(json.dumps(_header(job)))
    differs = [
        f"{key}: {there.get(key)} there, {asked[key]} asked for"
        for key in ("journal", "plan_digest", "max_shard_bytes")
        if there.get(key) != asked[key]
    ]
    if not differs and list(there["unit_bytes"].items()) == list(asked["unit_bytes"].items()):
        return
    old, new = there.get("about", {}), asked["about"]
    differs += [
        f"{key}: {old.get(key, 'none')} there, {new.get(key, 'none')} asked for"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]
    before, after = there.get("unit_bytes", {}), asked["unit_bytes"]
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        differs.append(f"{len(changed)} units, such as {changed[0]}")
    lines = "".join(f"\n  - {line}" for line in differs or ["the order of the units"])
    raise CheckpointError(
        f"{path.parent}: holds the beginning of another conversion:{lines}",
        hint="ask for the same again, choose another folder, or remove this one",
    )
