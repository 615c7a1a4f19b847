"""Rebuild the natural text:  python -m training.corpus

Downloads the packages of `packages.toml` and writes `prose.txt.xz` and `code.txt.xz` for training
(not tracked). With --excerpts it also writes what the repository tracks: excerpts of the held-out
packages and the sketch for the overlap check. The same packages give the same text everywhere.
"""

import argparse
import hashlib
import logging
import lzma
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer

from training.data.tables import FOLDER as TABLES
from training.data.text import CORPUS, KINDS, TOKENIZER
from training.extract import extract
from training.overlap import Index, Overlap, Sketch, check, clean_pieces
from training.packages import Package, download, read_packages

log = logging.getLogger("training.corpus")

# Characters of one package, so that no package is most of what the model reads.
MOST = {"prose": 4_000_000, "code": 2_900_000}
MAX_TRAVEL_BYTES = 20_000_000  # of both files together
EXCERPT_CHARS = 150_000  # per kind
MIN_PIECE_TOKENS = 256
MACHINE_PATH = re.compile(r"/(home|Users|root)/")  # the repository holds none, quoted or not
BATCH = 1_000
ARCHIVES = CORPUS.parent / "archives"
SKETCH = TABLES / "overlap.json.xz"
Documents = dict[str, list[str]]  # kind -> documents


def read_all(packages: Sequence[Package], folder: Path) -> Documents:
    """Documents of all packages, each once, at most `MOST` of each package."""
    out: Documents = {kind: [] for kind in KINDS}
    for package in packages:
        found = extract(folder / package.file, package.exclude)
        for path, words in found.dropped.items():
            log.info("%s: %s left out: %s", package.name, path, words)
        for kind in KINDS:
            taken = _take(getattr(found, kind), MOST[kind])
            out[kind] += taken
            log.info("%s: %d %s documents, %.2f MB", package.name, len(taken), kind, _mb(taken))
    return {kind: list(dict.fromkeys(documents)) for kind, documents in out.items()}


def _take(documents: Sequence[str], most: int) -> list[str]:
    """All, or a choice that depends on the documents alone, in their order."""
    if sum(map(len, documents)) <= most:
        return list(documents)
    chosen, total = set(), 0
    for document in sorted(documents, key=_digest):
        total += len(document)
        if total > most:
            break
        chosen.add(document)
    return [document for document in documents if document in chosen]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _mb(documents: Sequence[str]) -> float:
    return sum(map(len, documents)) / 1e6


def write_training(documents: Documents, folder: Path) -> None:
    """The two files that travel. Raises ValueError when they are too large for that."""
    total = 0
    for kind in KINDS:
        path = folder / f"{kind}.txt.xz"
        text = "\f".join(documents[kind]).encode()
        path.write_bytes(lzma.compress(text, preset=9))
        total += path.stat().st_size
        log.info("%s: %.1f MB of text, %d bytes", path.name, len(text) / 1e6, path.stat().st_size)
    if total > MAX_TRAVEL_BYTES:
        raise ValueError(f"{folder}: {total} bytes; at most {MAX_TRAVEL_BYTES}: lower MOST")


def excerpts(index: Index, tokenizer: Tokenizer, documents: Documents) -> Documents:
    """Pieces of held-out documents that share nothing with the training text, in chance order.

    A piece begins and ends elsewhere than its document, so that its first and last tokens may
    differ: the pieces are cleaned again until nothing is left to remove.
    """
    out: Documents = {}
    for kind in KINDS:
        kept: list[str] = []
        total = 0
        for document in sorted(documents[kind], key=_digest):
            if total >= EXCERPT_CHARS:
                break
            pieces = list(_clean(index, tokenizer, document))
            kept += pieces
            total += sum(map(len, pieces))
        out[kind] = [piece for piece in kept if not MACHINE_PATH.search(piece)]
    return out


def _clean(index: Index, tokenizer: Tokenizer, document: str) -> Iterator[str]:
    for piece in clean_pieces(index, tokenizer, document, MIN_PIECE_TOKENS):
        if piece == document:
            yield piece
        else:
            yield from _clean(index, tokenizer, piece)


def _batches(documents: Documents) -> Iterator[Sequence[str]]:
    for kind in KINDS:
        for first in range(0, len(documents[kind]), BATCH):
            yield documents[kind][first : first + BATCH]


def write_excerpts(training: Documents, held_out: Documents, names: Sequence[str]) -> None:
    """The tracked files. Raises ValueError if the excerpts still overlap."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    index = Index.of(tokenizer, _batches(training))
    log.info("index: %d lines, %d runs", len(index.lines), len(index.runs))
    found = excerpts(index, tokenizer, held_out)
    results: dict[str, Mapping[str, int]] = {}
    for kind in KINDS:
        before = check(index, tokenizer, held_out[kind])
        after: Overlap = check(index, tokenizer, found[kind])
        log.info("%s: %s before, %s after", kind, before, after)
        if after.lines_found or after.runs_found:
            raise ValueError(f"{kind}: the excerpts overlap the training text: {after}")
        results[f"{kind}_all"], results[f"{kind}_excerpt"] = asdict(before), asdict(after)
        packed = lzma.compress("\f".join(found[kind]).encode(), preset=9 | lzma.PRESET_EXTREME)
        (TABLES / f"held_out_{kind}.txt.xz").write_bytes(packed)
    about = {"held_out_packages": list(names), "training_mb": {k: _mb(training[k]) for k in KINDS}}
    Sketch.of(index).write(SKETCH, {**about, "checked_against_all": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=CORPUS, help="where the text goes")
    parser.add_argument("--archives", type=Path, default=ARCHIVES, help="kept downloads")
    parser.add_argument("--excerpts", action="store_true", help="also write the tracked files")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    packages = read_packages()
    archives = options.archives
    download(packages, archives)
    training = read_all([p for p in packages if not p.held_out], archives)
    write_training(training, options.folder)
    if options.excerpts:
        apart = [package for package in packages if package.held_out]
        names = [package.name for package in apart]
        write_excerpts(training, read_all(apart, archives), names)


if __name__ == "__main__":
    main()
