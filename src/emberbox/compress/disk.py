"""May a conversion write to this folder: is it a new place, writable, and is there room?

Everything here is asked before a weight is read. Creates nothing.
"""

import os
import shutil
from pathlib import Path

from emberbox.errors import CheckpointError, EnvironmentProblem, SettingsError

# Headers and index (0.2 KB a tensor, twice: 60 MB at 150,000 tensors), tokenizer, card, journal.
OTHER_BYTES = 96 << 20
MAX_LISTED = 5


def require_apart(source: Path, folder: Path) -> None:
    """Raises SettingsError if `folder` is `source` or lies in it."""
    inside, outside = folder.resolve(), source.resolve()
    if inside == outside or outside in inside.parents:
        where = "is the folder to read from" if inside == outside else f"lies inside {source}"
        raise SettingsError(
            f"{folder}: {where}; the source is never written to", hint="choose another folder"
        )


def require_writable(folder: Path) -> None:
    """Raises EnvironmentProblem if `folder`, or the nearest parent there is, takes no files."""
    place = nearest_existing(folder)
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


def require_space(folder: Path, *, output_bytes: int, unit_bytes: int, state_bytes: int) -> None:
    """Room for what is still to be written, the largest unit once more, and states to resume from.

    The largest unit because its tensors lie on disk beside the shards made of them. Raises
    EnvironmentProblem that says what is needed, free, and where.
    """
    needed = output_bytes + unit_bytes + state_bytes + OTHER_BYTES
    place = nearest_existing(folder)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise EnvironmentProblem(
            f"{place}: {_gb(needed)} needed, {_gb(free)} free "
            f"({_gb(output_bytes)} of weights to write, {_gb(unit_bytes)} for the largest unit "
            f"while it is put together, {_gb(state_bytes)} of state to resume from, "
            f"{_gb(OTHER_BYTES)} for the rest)",
            hint="free some space or choose a folder on another disk",
        )


def nearest_existing(folder: Path) -> Path:
    """`folder`, or the nearest of its parents that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
