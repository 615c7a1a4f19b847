"""Does held-out text stand in the training text? Lines of 30 characters and runs of 13 tokens.

`Index` holds every line and run of the training text as 64-bit hashes, `Sketch` the small, fixed
share of them that is committed, so that the check runs where there is no corpus. Knows no package.
"""

import base64
import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Hashes = NDArray[np.uint64]
MIN_LINE = 30
RUN = 13
LINE_SHARE, RUN_SHARE = 64, 4096  # a sketch keeps one of so many
_MIX = np.uint64(0x9E3779B97F4A7C15)


def line_hashes(text: str) -> Hashes:
    """One hash per line of at least `MIN_LINE` characters, blanks at its ends left out."""
    lines = (line.strip() for line in text.split("\n"))
    digests = (_hash(line) for line in lines if len(line) >= MIN_LINE)
    return np.fromiter(digests, np.uint64)


def run_hashes(ids: NDArray[np.integer]) -> Hashes:
    """One hash per run of `RUN` tokens; entry i is the run that begins at token i."""
    if len(ids) < RUN:
        return np.zeros(0, np.uint64)
    wide = ids.astype(np.uint64) + np.uint64(1)
    total = np.zeros(len(ids) - RUN + 1, np.uint64)
    for k in range(RUN):
        total = (total ^ wide[k : k + len(total)]) * _MIX
        total ^= total >> np.uint64(29)
    return total


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Index:
    """Sorted hashes of the training text."""

    lines: Hashes
    runs: Hashes

    @classmethod
    def of(cls, tokenizer: Tokenizer, documents: Iterable[Sequence[str]]) -> "Index":
        """`documents` in batches, as they are tokenised."""
        lines, runs = [], []
        for batch in documents:
            lines += [line_hashes(text) for text in batch]
            encoded = tokenizer.encode_batch_fast(list(batch), add_special_tokens=False)
            runs += [run_hashes(np.array(each.ids, dtype=np.int64)) for each in encoded]
        return cls(np.unique(np.concatenate(lines)), np.unique(np.concatenate(runs)))


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many lines and runs of a held-out text were checked and found in the training text."""

    lines: int
    lines_found: int
    runs: int
    runs_found: int


@dataclass(frozen=True, slots=True)
class Sketch:
    """The hashes of an index that divide by the shares."""

    lines: Hashes
    runs: Hashes

    @classmethod
    def of(cls, index: Index) -> "Sketch":
        return cls(_share(index.lines, LINE_SHARE), _share(index.runs, RUN_SHARE))

    @classmethod
    def read(cls, path: Path) -> "Sketch":
        raw = json.loads(lzma.decompress(path.read_bytes()))
        found = (np.frombuffer(base64.b64decode(raw[k]), "<u8") for k in ("lines", "runs"))
        return cls(*(hashes.astype(np.uint64) for hashes in found))

    def write(self, path: Path, about: dict[str, object]) -> None:
        """Packed JSON, hashes as base64 of 64-bit numbers; `about`: of what text it was made."""
        stored = {k: getattr(self, k).astype("<u8").tobytes() for k in ("lines", "runs")}
        hashes = {k: base64.b64encode(raw).decode() for k, raw in stored.items()}
        text = json.dumps({"about": about, **hashes}) + "\n"
        path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))

    def check(self, tokenizer: Tokenizer, documents: Iterable[str]) -> Overlap:
        """The same question on the sketch's share of the held-out text."""
        return _check(self.lines, self.runs, _share_of_text(tokenizer, documents))


def check(index: Index, tokenizer: Tokenizer, documents: Iterable[str]) -> Overlap:
    """All lines and runs of `documents` against the whole index."""
    return _check(index.lines, index.runs, _hashes_of_text(tokenizer, documents))


def _check(lines: Hashes, runs: Hashes, text: tuple[Hashes, Hashes]) -> Overlap:
    found = [
        int(contains(known, asked).sum()) for known, asked in zip((lines, runs), text, strict=True)
    ]
    return Overlap(len(text[0]), found[0], len(text[1]), found[1])


def contains(known: Hashes, asked: Hashes) -> NDArray[np.bool_]:
    """Which of `asked` stand in the sorted `known`."""
    if not len(known):
        return np.zeros(len(asked), np.bool_)
    at = np.searchsorted(known, asked).clip(max=len(known) - 1)
    found: NDArray[np.bool_] = known[at] == asked
    return found


def _share(hashes: Hashes, share: int) -> Hashes:
    kept: Hashes = hashes[hashes % np.uint64(share) == 0]
    return kept


def _hashes_of_text(tokenizer: Tokenizer, documents: Iterable[str]) -> tuple[Hashes, Hashes]:
    lines, runs = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    for text in documents:
        lines.append(line_hashes(text))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        runs.append(run_hashes(np.array(ids, dtype=np.int64)))
    return np.concatenate(lines), np.concatenate(runs)


def _share_of_text(tokenizer: Tokenizer, documents: Iterable[str]) -> tuple[Hashes, Hashes]:
    lines, runs = _hashes_of_text(tokenizer, documents)
    return _share(lines, LINE_SHARE), _share(runs, RUN_SHARE)


def clean_pieces(
    index: Index, tokenizer: Tokenizer, document: str, min_tokens: int
) -> Iterator[str]:
    """The stretches of whole lines of `document` that share no line and no run with the index."""
    encoded = tokenizer.encode(document, add_special_tokens=False)
    found = contains(index.runs, run_hashes(np.array(encoded.ids, dtype=np.int64)))
    dirty = np.zeros(len(document) + 1, np.bool_)
    for start in np.flatnonzero(found):
        dirty[encoded.offsets[start][0] : encoded.offsets[start + RUN - 1][1]] = True
    at, piece = 0, ""
    for line in document.splitlines(keepends=True):
        known = contains(index.lines, line_hashes(line)).any()
        if known or dirty[at : at + len(line)].any():
            yield from _long_enough(tokenizer, piece, min_tokens)
            piece = ""
        else:
            piece += line
        at += len(line)
    yield from _long_enough(tokenizer, piece, min_tokens)


def _long_enough(tokenizer: Tokenizer, piece: str, min_tokens: int) -> Iterator[str]:
    text = piece.strip("\n")
    if text and len(tokenizer.encode(text, add_special_tokens=False).ids) >= min_tokens:
        yield text + "\n"
