"""Parse one JSON object from bytes that nobody vouches for. Knows JSON; knows no tensors.

Stricter than `json.loads`: UTF-8 only, an object at the top, no key twice in any object, no NaN or
Infinity, no unpaired surrogates. Everything wrong is a JsonProblem; no other exception leaves here.
"""

import json
import stat
from pathlib import Path

MAX_JSON_BYTES = 100_000_000

JsonObject = dict[str, object]


class JsonProblem(Exception):
    """The bytes are not the JSON object we accept; the text says why."""


class DuplicateKey(JsonProblem):
    """One key stands twice in one object."""


def read_object(path: Path) -> JsonObject:
    """The object in a file. Raises JsonProblem, also for one that cannot be read or is too long."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for without end
            raise JsonProblem("cannot be read: not a regular file")
        num_bytes = status.st_size
        if num_bytes > MAX_JSON_BYTES:
            raise JsonProblem(f"{num_bytes} bytes long, the limit is {MAX_JSON_BYTES}")
        return parse_object(path.read_bytes().strip())
    except OSError as error:
        raise JsonProblem(f"cannot be read: {error.strerror}") from error


def parse_object(raw: bytes | bytearray) -> JsonObject:
    """Return the object in `raw`; trailing JSON white space is allowed, leading is not.

    Raises DuplicateKey or JsonProblem. Memory is proportional to len(raw).
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonProblem(f"not UTF-8 at byte {error.start}") from None
    if not text.startswith("{"):
        raise JsonProblem(f"does not start with '{{' but with {text[:1]!r}")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise JsonProblem("nested too deeply") from None
    except ValueError as error:  # also an integer of more digits than Python converts
        raise JsonProblem(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise JsonProblem("not an object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> JsonObject:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKey(f"the key {key!r} stands twice in one object")
            seen.add(key)
    for key in found:
        _require_encodable(key)
    return found


def _require_encodable(key: str) -> None:
    # "\ud800" is valid for Python's parser, but the text could never be printed or written again.
    try:
        key.encode("utf-8")
    except UnicodeEncodeError:
        raise JsonProblem(f"the key {key!r} holds an unpaired surrogate") from None


def _refuse_constant(constant: str) -> object:
    raise JsonProblem(f"{constant} is not JSON")
