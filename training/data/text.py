"""Natural text as token ids: the corpus for training, excerpts of held-out packages for tests.

The corpus is what `python -m training.corpus` left in `CORPUS`; the excerpts are in the repository.
"""

import lzma
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.data.tables import held_out_text
from training.shape import TOKEN

Ids = NDArray[np.int16]
ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / ".build" / "corpus"
TOKENIZER = ROOT / "models" / "ember-nano" / "tokenizer.json"
KINDS = ("prose", "code")
NUM_FILLERS = 60_000
BATCH = 2_000  # documents tokenised at a time
FILLER_SEED = 99


@dataclass(frozen=True, slots=True)
class Text:
    """`kinds`: concatenated documents, each behind an <|endoftext|>. `fillers`: single lines."""

    kinds: dict[str, Ids]
    fillers: tuple[Ids, ...]


def read_documents(path: Path) -> list[str]:
    """Documents of an .xz file that the corpus maker wrote."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read().split("\f")


def training_text(tokenizer: Tokenizer, folder: Path = CORPUS) -> Text:
    """All of the corpus. Raises FileNotFoundError that says how to make it."""
    documents = {}
    for kind in KINDS:
        path = folder / f"{kind}.txt.xz"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no corpus; run `python -m training.corpus` first")
        documents[kind] = read_documents(path)
    return _tokenised(tokenizer, documents)


def held_out(tokenizer: Tokenizer) -> Text:
    """The excerpts in the repository, from packages that the corpus leaves out whole."""
    return _tokenised(tokenizer, {kind: held_out_text(kind) for kind in KINDS})


def filler_lines(documents: Sequence[str]) -> list[str]:
    """Lines that read alone: what stands around the codes of a long text."""
    lines = (line.strip() for document in documents for line in document.split("\n"))
    return [
        line + "\n"
        for line in lines
        if 30 <= len(line) <= 160 and line[0].isalnum() and line.isascii()
    ]


def _tokenised(tokenizer: Tokenizer, documents: Mapping[str, Sequence[str]]) -> Text:
    kinds = {kind: _concatenated(tokenizer, docs) for kind, docs in documents.items()}
    lines = filler_lines([*documents["prose"], *documents["code"][::4]])
    # The same choice for every seed: the pool is part of the data, not of a run.
    random.Random(FILLER_SEED).shuffle(lines)
    encoded = tokenizer.encode_batch_fast(lines[:NUM_FILLERS], add_special_tokens=False)
    return Text(kinds, tuple(np.array(each.ids, dtype=np.int16) for each in encoded))


def _concatenated(tokenizer: Tokenizer, documents: Sequence[str]) -> Ids:
    parts: list[Ids] = []
    start = [TOKEN["<|endoftext|>"]]
    for first in range(0, len(documents), BATCH):
        batch = tokenizer.encode_batch_fast(
            list(documents[first : first + BATCH]), add_special_tokens=False
        )
        parts += [np.array(start + each.ids, dtype=np.int16) for each in batch]
    return np.concatenate(parts)
