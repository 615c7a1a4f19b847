"""Calibration text as rows of token ids, from the shipped text or from the user's own.

Every document is tokenised once; the ids, one document after another, are cut into rows, and rows
are taken evenly over the text. What is chat markup is for the checkpoint's own template to say:
plain text never becomes a special token. Knows no network.
"""

import hashlib
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from emberbox.chat.messages import check_messages
from emberbox.chat.template import ChatTemplate
from emberbox.chat.tokenizer import Tokenizer
from emberbox.errors import RequestError, SettingsError
from emberbox.store.strict_json import JsonProblem, parse_object

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).with_name("calibration_text")
SUFFIXES = (".jsonl", ".md", ".txt")
DOCUMENT_START = "<|endoftext|>"  # before plain documents, where the tokenizer has it
# The whole text is tokenised in memory; 512,000 tokens of English are about 2 MB.
MAX_TEXT_BYTES = 32 * 2**20
OPTIONS = ("reasoning_effort", "enable_thinking", "clear_thinking")  # of a line with messages


@dataclass(frozen=True, slots=True)
class Calibration:
    """token_ids: int64 [rows, cols] on the CPU. source: a name without folders. sha256: of the
    text's bytes, the files of a folder one after another by name (`cat * | sha256sum`)."""

    token_ids: Tensor
    source: str
    sha256: str

    @property
    def rows_sha256(self) -> str:
        """Of the chosen rows: their ids one after another as little-endian 64-bit integers, as
        receipts hash the windows of a panel."""
        return hashlib.sha256(self.token_ids.numpy().astype("<i8").tobytes()).hexdigest()


def load_calibration(
    checkpoint: Path, source: Path | None, rows: int, cols: int, seed: int
) -> Calibration:
    """At most `rows` rows of `cols` tokens; fewer, with a warning, when the text is shorter.

    checkpoint: a folder with tokenizer and chat template. source: a .txt or .md file (one
    document), a .jsonl file (a line is an object with "messages", beside them "tools" and the
    options of the template, or with "text"; other keys are ignored), or a folder of such files;
    None is the text emberbox ships. seed: which row is taken of each of `rows` equal stretches.

    Raises SettingsError for a text that is missing, unreadable, malformed or shorter than one row,
    and CheckpointError for the tokenizer or template.
    """
    if rows < 1 or cols < 1:
        raise SettingsError(f"calibration: {rows} rows of {cols} tokens; both must be at least 1")
    texts = _read(SHIPPED if source is None else Path(source))
    encoder = _Encoder(Path(checkpoint))
    empty = torch.zeros(0, dtype=torch.int64)
    documents = (ids for path, raw in texts.items() for ids in encoder.documents(path, raw))
    ids = torch.cat([empty, *(torch.tensor(each, dtype=torch.int64) for each in documents)])
    name = "the shipped text" if source is None else Path(source).resolve().name
    available = len(ids) // cols
    if not available:
        raise SettingsError(
            f"{name}: {len(ids)} tokens of calibration text; one row needs {cols}",
            hint="give more text, or shorter rows",
        )
    if available < rows:
        log.warning("%s holds %d rows of %d tokens, not %d", name, available, cols, rows)
    chosen = _choose(available, min(rows, available), seed)
    table = ids[: available * cols].view(available, cols)
    digest = hashlib.sha256(b"".join(texts.values())).hexdigest()
    return Calibration(table[chosen], name, digest)


def _choose(available: int, rows: int, seed: int) -> list[int]:
    """One row of each of `rows` stretches that differ in length by at most one."""
    r = random.Random(seed)
    edges = [i * available // rows for i in range(rows + 1)]
    return [r.randrange(first, last) for first, last in pairwise(edges)]


def _read(source: Path) -> dict[Path, bytes]:
    """The files of `source` by name. Raises SettingsError when there is none, or too much."""
    try:
        files = _files(source)
        size = sum(path.stat().st_size for path in files)
        if size <= MAX_TEXT_BYTES:
            return {path: path.read_bytes() for path in files}
    except OSError as error:
        raise SettingsError(f"{source}: not readable: {error}") from error
    raise SettingsError(
        f"{source}: {size} bytes of calibration text; at most {MAX_TEXT_BYTES} are taken",
        hint="give an excerpt; a few megabytes are plenty",
    )


def _files(source: Path) -> list[Path]:
    known = ", ".join(SUFFIXES)
    if source.is_dir():
        found = [p for p in source.iterdir() if p.suffix in SUFFIXES and p.is_file()]
        if not found:
            raise SettingsError(f"{source}: no {known} file in this folder")
        return sorted(found, key=lambda path: path.name)
    if not source.is_file():
        raise SettingsError(f"{source}: not there; expected a file or folder of calibration text")
    if source.suffix not in SUFFIXES:
        raise SettingsError(f"{source}: expected {known}, or a folder of such files")
    return [source]


class _Encoder:
    """Documents to ids with a checkpoint's tokenizer; its template is opened if one is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = Tokenizer.open(folder)
        start = self._tokenizer.special_tokens.get(DOCUMENT_START)
        self._start = [] if start is None else [start]

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.open(self._folder)

    def documents(self, path: Path, raw: bytes) -> Iterator[list[int]]:
        """Ids of each document of a file. Raises SettingsError with file and line."""
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise SettingsError(f"{path}: not UTF-8 at byte {error.start}") from None
        if path.suffix != ".jsonl":
            yield self._plain(text)
            return
        # Not splitlines: U+2028 and its like may stand inside a JSON string.
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                try:
                    ids = self._line(line)
                except (JsonProblem, RequestError, _Unfit) as error:
                    raise SettingsError(f"{path}, line {number}: {error}") from error
                yield ids

    def _plain(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text)
        return self._start + ids if ids else []

    def _line(self, line: str) -> list[int]:
        entry = parse_object(line.strip().encode())
        if "messages" in entry:
            return self._conversation(entry)
        text = entry.get("text")
        if not isinstance(text, str):
            raise _Unfit('expected "messages", or "text" with a string')
        return self._plain(text)

    def _conversation(self, entry: dict[str, object]) -> list[int]:
        conversation = check_messages(entry["messages"])
        if conversation.media:
            raise _Unfit(f"{conversation.media[0].param}: calibration takes text alone")
        text = self._template.render_text(
            conversation,
            entry.get("tools"),  # type: ignore[arg-type]  # checked there
            add_generation_prompt=False,
            **{key: entry[key] for key in OPTIONS if key in entry},  # type: ignore[arg-type]
        )
        return self._tokenizer.encode_template(text)


class _Unfit(Exception):
    """A line of JSON that is no document; the text says why."""
