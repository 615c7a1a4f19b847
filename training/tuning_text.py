"""Write token rows for tuning after quantising:  python -m training.tuning_text --rows 4096

Inputs alone, the unquantised model gives the targets: skills as in training, natural text of the
training split, sentences in many scripts; no picture. Shares no seed with anything else. Row i
depends on the seed and i, so a longer file begins with a shorter one.
"""

import argparse
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.data.maker import WHOLE, Encoder, RowMaker
from training.data.seeds import Purpose, stream
from training.data.tables import FOLDER as TABLES
from training.data.text import CORPUS, KINDS, TOKENIZER, Ids, Text, filler_lines, read_documents
from training.data.turns import Dice
from training.shape import TOKEN

log = logging.getLogger("training.tuning_text")

Rows = NDArray[np.uint16]
ROW_TOKENS = 512
FILE = CORPUS.parent / "tuning_text.npz"
LANGUAGES_SHARE = 0.04
# More natural text than in training: it is what the quantised model loses first.
MIXTURE = replace(WHOLE, short={**WHOLE.short, "text": 5.0})
# Of each kind, chosen by the seed: all of the corpus takes minutes to tokenise.
CHARS = 6_000_000
FILLERS = 20_000


def tuning_text(tokenizer: Tokenizer, seed: int, folder: Path = CORPUS) -> Text:
    """Documents of the training split. Raises FileNotFoundError that says how to make it."""
    kinds: dict[str, Ids] = {}
    lines: list[str] = []
    for kind in KINDS:
        path = folder / f"{kind}.txt.xz"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no corpus; run `python -m training.corpus` first")
        documents = _chosen(read_documents(path), kind, seed)
        kinds[kind] = _concatenated(tokenizer, documents)
        lines += filler_lines(documents)
    stream(Purpose.TUNING, "fillers", seed).shuffle(lines)
    encoded = tokenizer.encode_batch_fast(lines[:FILLERS], add_special_tokens=False)
    return Text(kinds, tuple(np.array(each.ids, dtype=np.int16) for each in encoded))


def _chosen(documents: list[str], kind: str, seed: int) -> list[str]:
    """In chance order, up to `CHARS`."""
    stream(Purpose.TUNING, "documents", kind, seed).shuffle(documents)
    ends = np.cumsum([len(document) for document in documents])
    return documents[: 1 + int(np.searchsorted(ends, CHARS))]


def _concatenated(tokenizer: Tokenizer, documents: Sequence[str]) -> Ids:
    start = [TOKEN["<|endoftext|>"]]
    encoded = tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
    return np.concatenate([np.array(start + each.ids, dtype=np.int16) for each in encoded])


class TuningRows:
    """Rows over one choice of text."""

    def __init__(self, tokenizer: Tokenizer, text: Text, seed: int) -> None:
        self.encoder, self.text, self.seed = Encoder(tokenizer), text, seed
        sentences = (TABLES / "tuning_languages.txt").read_text(encoding="utf-8")
        self.sentences = [self.encoder.ids(line) for line in sentences.splitlines(keepends=True)]

    def rows(self, count: int) -> Rows:
        """Token ids, uint16 [count, ROW_TOKENS], without padding."""
        return np.stack([self._row(i) for i in range(count)])

    def _row(self, number: int) -> NDArray[np.uint16]:
        dice = Dice(stream(Purpose.TUNING, "row", self.seed, number))
        if dice.chance(LANGUAGES_SHARE):
            sentences = dice.r.sample(self.sentences, len(self.sentences))
            return np.concatenate(sentences)[:ROW_TOKENS].astype(np.uint16)
        maker = RowMaker(self.encoder, self.text, dice, MIXTURE)
        parts: list[NDArray[np.int64]] = []
        while sum(map(len, parts)) < ROW_TOKENS:
            ids, weights = maker.row(ROW_TOKENS)
            parts.append(ids[weights >= 0])  # what follows takes the place of the padding
        return np.concatenate(parts)[:ROW_TOKENS].astype(np.uint16)


def digest(rows: Rows) -> str:
    """SHA-256 of the ids, row after row, little-endian."""
    return hashlib.sha256(rows.astype("<u2").tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=4096, help="of 512 tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=FILE, help="token_ids, uint16 [rows, 512]")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    text = tuning_text(tokenizer, options.seed)
    rows = TuningRows(tokenizer, text, options.seed).rows(options.rows)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, token_ids=rows)
    size = options.out.stat().st_size
    log.info("%s: %s, %d bytes; sha256 of the ids %s", options.out, rows.shape, size, digest(rows))


if __name__ == "__main__":
    main()
