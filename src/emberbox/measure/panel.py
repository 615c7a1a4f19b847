"""Panels: the fixed windows of token ids that fidelity is measured on, data files with a hash.

    {"schema": "emberbox.panel.v1", "name": str, "about": str, "tokenizer_sha256": str or null,
     "windows": [{"id": str, "document": str, "domain": str, "source": str, "token_ids": [int]}]}

`name`, `about`, `tokenizer_sha256` and `source` may be absent, as in a panel made of public token
ids. tokenizer_sha256 is that of the tokenizer.json the ids are of. Knows no model and no text.
"""

import hashlib
import io
import lzma
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from emberbox.errors import MeasureError
from emberbox.measure.documents import canonical_json, parse_document, read_file
from emberbox.store.strict_json import JsonObject, JsonProblem

SCHEMA = "emberbox.panel.v1"
SHIPPED = Path(__file__).with_name("panels")
SUFFIXES = (".json.xz", ".json")
MAX_BYTES = 256 << 20  # unpacked; a million tokens take about 6 MB
MAX_WINDOWS = 10_000
MAX_LINE = 200

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TOP = {"schema": str, "name": str, "about": str, "tokenizer_sha256": str | None, "windows": list}
_WINDOW = {"id": str, "document": str, "domain": str, "source": str, "token_ids": list}
_OPTIONAL = frozenset({"name", "about", "tokenizer_sha256", "source"})


@dataclass(frozen=True, slots=True)
class Window:
    """T tokens of one document, of which T - 1 positions are scored: t predicts token t + 1."""

    id: str
    document: str
    domain: str
    token_ids: tuple[int, ...]

    @property
    def num_positions(self) -> int:
        """Scored positions."""
        return len(self.token_ids) - 1

    def token_sha256(self) -> str:
        """Of the ids as little-endian 64-bit integers."""
        data = b"".join(token.to_bytes(8, "little") for token in self.token_ids)
        return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class Panel:
    """Windows in order; sha256 is of the canonical JSON of the whole document."""

    name: str
    windows: tuple[Window, ...]
    sha256: str
    tokenizer_sha256: str | None = None

    @property
    def num_positions(self) -> int:
        """Scored positions of all windows."""
        return sum(window.num_positions for window in self.windows)


def load_panel(name_or_path: str | Path) -> Panel:
    """The panel that ships under a name ("nano-25"), or that of a .json or .json.xz file.

    Raises MeasureError that names the file, and the window where one is at fault.
    """
    path = _find(str(name_or_path))
    try:
        document = parse_document(_read(path))
    except (JsonProblem, lzma.LZMAError, EOFError) as error:
        raise MeasureError(f"{path}: not a panel: {error}") from error
    problem = _problem(document, _TOP)
    if problem is None and document["schema"] != SCHEMA:
        problem = f"schema is {document['schema']!r}, expected {SCHEMA!r}"
    digest = document.get("tokenizer_sha256")
    if problem is None and digest is not None and not _DIGEST.fullmatch(str(digest)):
        problem = f"tokenizer_sha256 is {digest!r}, expected 64 hex digits or null"
    name = str(document.get("name", path.name.removesuffix(".xz").removesuffix(".json")))
    if problem is None and not _is_line(name):
        problem = _no_line("name", name)
    if problem is not None:
        raise MeasureError(f"{path}: {problem}")
    return Panel(
        name=name,
        windows=_windows(path, document),
        sha256=hashlib.sha256(canonical_json(document)).hexdigest(),
        tokenizer_sha256=None if digest is None else str(digest),
    )


def shipped_panels() -> list[str]:
    """Names that `load_panel` knows."""
    found = {p.name.split(".")[0] for p in SHIPPED.glob("*.json*")} if SHIPPED.is_dir() else set()
    return sorted(found)


def _find(name: str) -> Path:
    if name.endswith(SUFFIXES) or "/" in name:
        return Path(name)
    for suffix in SUFFIXES:
        if (SHIPPED / (name + suffix)).is_file():
            return SHIPPED / (name + suffix)
    known = ", ".join(shipped_panels()) or "none"
    raise MeasureError(
        f"there is no panel {name!r}", hint=f"shipped: {known}; or the path of a .json(.xz) file"
    )


def _read(path: Path) -> bytes:
    data = read_file(path, MAX_BYTES)
    if path.suffix != ".xz":
        return data
    with lzma.open(io.BytesIO(data)) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise JsonProblem(f"more than {MAX_BYTES} bytes")
    return data


def _is_line(text: str) -> bool:
    """Whether a receipt can hold it and a terminal shows it as it is."""
    return 0 < len(text) <= MAX_LINE and text.isprintable()


def _no_line(key: str, text: str) -> str:
    return f"{key} is {text[:80]!r}, expected a line of text of at most {MAX_LINE} characters"


def _problem(entry: Mapping[str, object], kinds: Mapping[str, object]) -> str | None:
    """What keeps `entry` from having these keys with values of these kinds."""
    unknown = sorted(entry.keys() - kinds.keys())
    missing = sorted(kinds.keys() - entry.keys() - _OPTIONAL)
    if unknown or missing:
        wanted = [f"unknown key {key!r}" for key in unknown]
        return ", ".join(wanted + [f"{key!r} is missing" for key in missing])
    for key, kind in kinds.items():
        if key in entry and not isinstance(entry[key], kind):  # type: ignore[arg-type]  # a type
            return f"{key} is {str(entry[key])[:80]!r}, not of the expected kind"
    return None


def _windows(path: Path, document: JsonObject) -> tuple[Window, ...]:
    entries = document["windows"]
    assert isinstance(entries, list), "checked before"
    if not entries:
        raise MeasureError(f"{path}: windows is empty")
    if len(entries) > MAX_WINDOWS:
        raise MeasureError(f"{path}: {len(entries)} windows, at most {MAX_WINDOWS}")
    windows: dict[str, Window] = {}
    seen: dict[tuple[int, ...], str] = {}
    for number, entry in enumerate(entries):
        window = _window(f"{path}: window number {number}", entry)
        where = f"{path}: window {window.id!r}"
        if window.id in windows:
            raise MeasureError(f"{where}: the id stands twice")
        if window.token_ids in seen:
            raise MeasureError(f"{where}: the same tokens as window {seen[window.token_ids]!r}")
        windows[window.id], seen[window.token_ids] = window, window.id
    return tuple(windows.values())


def _window(where: str, entry: object) -> Window:
    if not isinstance(entry, dict):
        raise MeasureError(f"{where}: not an object")
    if isinstance(entry.get("id"), str):
        where = f"{where} ({entry['id'][:80]!r})"
    problem = _problem(entry, _WINDOW)
    for key in ("id", "document", "domain"):
        if problem is None and not _is_line(entry[key]):
            problem = _no_line(key, entry[key])
    ids = entry.get("token_ids", ())
    if problem is None and not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        problem = "token_ids holds something that is not a token id"
    if problem is None and len(ids) < 2:
        problem = f"{len(ids)} tokens; at least 2 are needed to score a position"
    if problem is not None:
        raise MeasureError(f"{where}: {problem}")
    return Window(entry["id"], entry["document"], entry["domain"], tuple(ids))
