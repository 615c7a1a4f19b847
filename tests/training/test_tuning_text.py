"""Rows for tuning: reproducible, full, of the mixture that is meant, and apart from the panel."""

import hashlib
import json
import lzma

import numpy as np
import pytest
from tokenizers import Tokenizer

from emberbox.compress.calibration import SHIPPED
from training import panel, tuning_text
from training.data.tables import FOLDER as TABLES
from training.data.tables import small_talk
from training.data.text import TOKENIZER, held_out
from training.shape import PAD_ID, TOKEN
from training.tuning_text import TuningRows, digest

TOKENS = Tokenizer.from_file(str(TOKENIZER))
SENTENCES = (TABLES / "tuning_languages.txt").read_text(encoding="utf-8").splitlines()


def decoded(row):
    return TOKENS.decode(row.tolist(), skip_special_tokens=False)


def ids_of(text):
    return TOKENS.encode(text, add_special_tokens=False).ids


def runs(ids, length):
    return {tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)}


@pytest.fixture(scope="module")
def text():
    return held_out(TOKENS)


@pytest.fixture(scope="module")
def rows(text):
    return TuningRows(TOKENS, text, 1).rows(300)


# -- rows -----------------------------------------------------------------------------------------


def test_a_longer_file_begins_with_a_shorter_one_and_a_seed_makes_another(rows, text):
    few = TuningRows(TOKENS, text, 1).rows(7)
    assert (few.dtype, few.shape) == (np.uint16, (7, 512))
    assert np.array_equal(few, rows[:7])
    other = TuningRows(TOKENS, text, 2).rows(7)
    assert (few == other).mean() < 0.2


def test_rows_do_not_change_unnoticed(rows):
    """A new digest means that figures of tuned models cannot be made again."""
    assert digest(rows[:64]) == "a927baa5817b5e0591d4bc24eeedd6b53f4547c91425f3ccd98f9742ce579a2f"


def test_the_digest_is_of_the_ids_in_order():
    rows = np.array([[1, 2], [3, 258]], np.uint16)
    known = "0100020003000201"
    assert digest(rows) == hashlib.sha256(bytes.fromhex(known)).hexdigest()
    assert digest(rows) != digest(rows[::-1])


def test_rows_are_full(rows):
    padded = (rows[:, 1:] == PAD_ID) & (rows[:, :-1] == PAD_ID)
    assert not padded.any()
    assert rows.max() < TOKEN["<|image|>"]


def test_rows_are_skills_text_and_languages_by_their_shares(rows):
    shown = [decoded(row) for row in rows]
    languages = [s for s in shown if any(s.startswith(line) for line in SENTENCES)]
    talks = [s for s in shown if "<|system|>Reasoning Effort: " in s]
    assert 0.015 < len(languages) / len(rows) < 0.075
    assert 0.52 < len(talks) / len(rows) < 0.72  # 8.6 of 13.6, of what is no languages
    for sign in ("<tool_call>", '{"numbers":[', "</think>Noted.", "So ", " the code", "```python"):
        assert any(sign in s for s in talks), sign
    assert not any(s.count(line) > 1 for s in languages for line in SENTENCES)


def test_no_request_is_worded_as_training_never_says_it(rows):
    held = {f"<|user|>{way}<|assistant|>" for t in small_talk() for way in t.wordings.held_out}
    assert not [way for way in held if any(way in decoded(row) for row in rows)]


# -- apart from what is measured and from what is calibrated with ---------------------------------


def test_sentences_stand_neither_in_the_panel_nor_in_the_calibration_text():
    mine = set().union(*(runs(ids_of(line + "\n"), 24) for line in SENTENCES))
    content = json.loads(lzma.decompress(panel.FILE.read_bytes()))
    for window in content["windows"]:
        assert not mine & runs(window["token_ids"], 24), window["id"]
    for path in (SHIPPED / "languages.txt", TABLES / "panel_languages.txt"):
        assert not mine & runs(ids_of(path.read_text(encoding="utf-8")), 24), path.name
    assert len(set(SENTENCES)) == len(SENTENCES) > 40


# -- the corpus -----------------------------------------------------------------------------------


def corpus(folder, count):
    for kind in ("prose", "code"):
        documents = [f"Document {i} of {kind} says a thing or two here.\n" for i in range(count)]
        (folder / f"{kind}.txt.xz").write_bytes(lzma.compress("\f".join(documents).encode()))
    return folder


def test_documents_are_chosen_by_the_seed_up_to_a_size(tmp_path, monkeypatch):
    folder = corpus(tmp_path, 200)
    monkeypatch.setattr(tuning_text, "CHARS", 2000)
    first, again, other = (tuning_text.tuning_text(TOKENS, s, folder) for s in (1, 1, 2))
    shown = TOKENS.decode(first.kinds["code"].tolist(), skip_special_tokens=False)
    documents = shown.split("<|endoftext|>")[1:]
    assert 2000 <= sum(map(len, documents)) < 2060
    assert len(set(documents)) == len(documents)
    assert "of prose" not in shown
    assert np.array_equal(first.kinds["prose"], again.kinds["prose"])
    assert not np.array_equal(first.kinds["prose"], other.kinds["prose"])
    assert len(first.fillers) == 2 * len(documents)


def test_a_corpus_that_is_missing_is_named_with_what_makes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"prose.txt.xz: no corpus; run `python -m train"):
        tuning_text.tuning_text(TOKENS, 1, tmp_path)
