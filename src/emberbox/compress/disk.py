"""May a conversion write to this folder: is it a new place, writable, and is there room?

Everything here is asked before a weight is read. Creates nothing.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from emberbox.compress.journal import JOURNAL_NAME, Job
from emberbox.errors import CheckpointError, EnvironmentProblem, SettingsError
from emberbox.store.checksums import SUMS_NAME

# Headers and index (0.2 KB a tensor, twice: 60 MB at 150,000 tensors), tokenizer, card, journal.
OTHER_BYTES = 96 << 20
MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of disk at `place`: `needed` by a conversion from its beginning to its end, `free`."""

    place: Path
    needed: int
    free: int


def look(folder: Path, source: Path, job: Job, *, resume: bool) -> Room:
    """Whether the job can begin in `folder`, as it is now. With `resume` more may be there already.

    Raises what beginning it would raise: SettingsError, EnvironmentProblem, CheckpointError.
    """
    require_apart(source, folder)
    require_writable(folder)
    units = job.unit_bytes.values()
    is_begun = (folder / JOURNAL_NAME).exists()
    # A folder with checksums is complete, which whoever resumes compares.
    if resume and (is_begun or (folder / SUMS_NAME).exists()):
        return _room(folder, sum(units) + max(units) + 2 * job.state_bytes)
    if is_begun:
        raise CheckpointError(
            f"{folder}: holds the beginning of a conversion",
            hint="ask to resume it, choose another folder, or remove this one",
        )
    require_only(folder, frozenset(), "choose a new or an empty folder")
    return require_space(
        folder,
        output_bytes=sum(units),
        unit_bytes=max(units),
        state_bytes=2 * job.state_bytes,
    )


def require_apart(source: Path, folder: Path) -> None:
    """Raises SettingsError if `folder` is `source` or lies in it."""
    # Path.resolve raises RuntimeError where links go round in a circle.
    inside, outside = (Path(os.path.realpath(path)) for path in (folder, source))
    if inside == outside or outside in inside.parents:
        where = "is the folder to read from" if inside == outside else f"lies inside {source}"
        raise SettingsError(
            f"{folder}: {where}; the source is never written to", hint="choose another folder"
        )


def require_writable(folder: Path) -> None:
    """Raises EnvironmentProblem if `folder`, or the nearest parent there is, takes no files."""
    place = nearest_existing(folder)
    if not place.exists():
        raise EnvironmentProblem(f"{place}: is a link that leads nowhere, expected a folder")
    if not place.is_dir():
        raise EnvironmentProblem(f"{place}: is a file, expected a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"{place}: no permission to write", hint="choose another folder")


def require_only(folder: Path, ours: frozenset[str], hint: str) -> None:
    """Raises CheckpointError that says what else than the names in `ours` is in `folder`."""
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    foreign = [name for name in names if name not in ours]
    if foreign:
        more = f" and {len(foreign) - MAX_LISTED} more" if len(foreign) > MAX_LISTED else ""
        raise CheckpointError(
            f"{folder}: holds other files: {', '.join(foreign[:MAX_LISTED])}{more}", hint=hint
        )


def require_space(folder: Path, *, output_bytes: int, unit_bytes: int, state_bytes: int) -> Room:
    """Room for what is still to be written, the largest unit once more, and states to resume from.

    The largest unit because its tensors lie on disk beside the shards made of them. Raises
    EnvironmentProblem that says what is needed, free, and where.
    """
    room = _room(folder, output_bytes + unit_bytes + state_bytes)
    if room.free < room.needed:
        raise EnvironmentProblem(
            f"{room.place}: {_gb(room.needed)} needed, {_gb(room.free)} free "
            f"({_gb(output_bytes)} of weights to write, {_gb(unit_bytes)} for the largest unit "
            f"while it is put together, {_gb(state_bytes)} of state to resume from, "
            f"{_gb(OTHER_BYTES)} for the rest)",
            hint="free some space or choose a folder on another disk",
        )
    return room


def _room(folder: Path, num_bytes: int) -> Room:
    """With what is needed beside `num_bytes`."""
    place = nearest_existing(folder)
    return Room(place, num_bytes + OTHER_BYTES, shutil.disk_usage(place).free)


def nearest_existing(folder: Path) -> Path:
    """`folder`, or the nearest of its parents that exists, if only as a link that leads nowhere."""
    return next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
