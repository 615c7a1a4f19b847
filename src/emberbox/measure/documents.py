"""Files that nobody vouches for, read whole and bounded; JSON in the one spelling that is hashed;
places where a file can be written.

Knows neither panels nor receipts.
"""

import json
import os
from pathlib import Path

from emberbox.errors import MeasureError
from emberbox.store.durable import remove
from emberbox.store.strict_json import JsonObject, JsonProblem, parse_object


def canonical_json(value: object) -> bytes:
    """The one spelling of a JSON value that is hashed."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def parse_document(raw: bytes) -> JsonObject:
    """The object in `raw`, which `canonical_json` can spell. Raises JsonProblem."""
    found = parse_object(raw.strip())
    try:
        canonical_json(found)
    except (ValueError, RecursionError) as error:  # 1e400, or a text that is no Unicode
        raise JsonProblem(f"cannot be written again: {error}") from None
    return found


def read_file(path: Path, max_bytes: int) -> bytes:
    """All of a file of at most `max_bytes`. Raises MeasureError for what is no file, or larger."""
    try:
        if not path.is_file():  # a pipe would never end, nor would a device
            reason = "not a file" if path.exists() else "no such file"
            raise MeasureError(f"{path}: cannot be read: {reason}")
        with path.open("rb") as file:
            found = file.read(max_bytes + 1)
    except OSError as error:
        raise MeasureError(f"{path}: cannot be read: {error.strerror}") from None
    if len(found) > max_bytes:
        raise MeasureError(f"{path}: larger than the {max_bytes} bytes that it may have")
    return found


def require_free(*paths: Path, may_replace: bool) -> None:
    """Raises MeasureError for what is there already, unless it may be replaced."""
    found = [path for path in paths if os.path.lexists(path)]  # a name too long is free
    if found and not may_replace:
        raise MeasureError(
            f"{found[0]}: is there already", hint="give another name, or --force to replace it"
        )


def partial_of(path: Path) -> Path:
    """The name under which `path` is written; no other process's."""
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def require_writable(path: Path) -> None:
    """Raises MeasureError where `path` could not be written: tries, and leaves nothing behind."""
    try:
        try:
            partial_of(path).write_bytes(bytes(1 << 16))  # as large as many a receipt
        finally:
            remove(partial_of(path))
    except OSError as error:
        raise MeasureError(
            f"{path}: not a place for a receipt: {error.strerror}",
            hint="a shorter name, or a folder that is there and takes new files",
        ) from None
