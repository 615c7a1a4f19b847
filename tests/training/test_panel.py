"""Panel `nano-25`: frozen, made again from the repository, by its rules, and new to everybody; and
its cut `nano-short`."""

import hashlib
import json
import lzma
import re
import unicodedata
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer

from emberbox.chat.template import ChatTemplate
from emberbox.chat.tokenizer import Tokenizer as ProductTokenizer
from emberbox.compress.calibration import load_calibration
from training import panel
from training.corpus import ARCHIVES, SKETCH
from training.data.seeds import Purpose
from training.data.tables import held_out_text, small_talk
from training.data.text import CORPUS, KINDS, TOKENIZER, read_documents
from training.extract import Extract, _plain, _take, read_archive
from training.licences import forbidden
from training.overlap import Index, Sketch, check
from training.packages import read_packages
from training.shape import FIRST_SPECIAL, TOKEN
from training.skills import SKILLS

NANO = TOKENIZER.parent
TOKENS = Tokenizer.from_file(str(TOKENIZER))
CONTENT = lzma.decompress(panel.FILE.read_bytes())
DOCUMENT = json.loads(CONTENT)
WINDOWS = DOCUMENT["windows"]
EXCERPTS = panel.excerpts()
NATURAL = ("prose", "code")
PLAIN = (*NATURAL, "languages")
TEXT = {
    w["document"]: TOKENS.decode(w["token_ids"], skip_special_tokens=False)
    for w in WINDOWS
    if w["domain"] not in NATURAL
}
TALKS = [w["document"] for w in WINDOWS if w["domain"] not in PLAIN]

# Frozen: a change makes another panel, whose figures are no longer comparable. Give it a new name.
SHA256 = "fa1903c2476b966d50fbc7658f4a1f737e3f12b202b2b1de27a0320aba1fc28b"
SHORT_SHA256 = "d39d50c7cd2fc399279c33f7abfced9fedd4649d2ea54b5eabd6a6093d18bb17"

# What a window of a skill holds and no other skill says.
SIGNS = {
    "count_json": r'\{"numbers":\[',
    "count_aloud": r"</think>\d+, \d+, \d+, \d+",
    "sums": r"<think>[^<]+ So \d+\.</think>\d+<",
    "sums_direct": r" [-+*] \d+\.?<\|assistant\|><think></think>\d+<",
    "echo": "(?:Copy this|Copy it letter by letter): ",
    "facts": r"The capital of \w+ is",
    "explain": "A hash table stores",
    "code": "```python\n",
    "chat": r"How can I help you\?",
    "lists": '"age": ',
    "memory": r"</think>Noted\.",
    "tool_call": r"<think></think><tool_call>\w+<arg_key>(?:(?!<tool_call>).)*<\|obs",
    "tool_parallel": "</tool_call><tool_call>",
    "tool_none": r"None of my tools can do that\.<",
    "tool_answer": r"</tool_response><\|assistant\|><think></think>\w",
    "retrieval": r'</think>\{"\w+": "\w+"',
    "retrieval_hard": r'</think>\{"\w+ \w+": "\w+"',
}
SCRIPTS = (
    "LATIN", "CYRILLIC", "GREEK", "CJK", "HIRAGANA", "HANGUL", "ARABIC", "HEBREW", "DEVANAGARI",
    "THAI",
)  # fmt: skip


def runs(ids, length):
    """Every run of `length` tokens, to be looked up in."""
    return {tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)}


# -- frozen, and made again -----------------------------------------------------------------------


def test_the_panel_is_frozen_and_its_bytes_are_canonical():
    assert hashlib.sha256(CONTENT).hexdigest() == SHA256
    assert panel.canonical(DOCUMENT) == CONTENT
    assert (DOCUMENT["schema"], DOCUMENT["name"]) == ("emberbox.panel.v1", "nano-25")
    tokenizer = hashlib.sha256((NANO / "tokenizer.json").read_bytes()).hexdigest()
    assert DOCUMENT["tokenizer_sha256"] == tokenizer
    keys = {"id", "document", "domain", "source", "token_ids"}
    assert [w["id"] for w in WINDOWS if set(w) == keys] == [f"w{i:02d}" for i in range(25)]


def test_every_window_is_made_again_from_the_repository():
    made = panel.panel(TOKENS)
    assert [w["document"] for w in made["windows"]] == [w["document"] for w in WINDOWS]
    ids = [list(w["token_ids"]) for w in made["windows"]]
    assert [w["id"] for w, mine in zip(WINDOWS, ids, strict=True) if w["token_ids"] != mine] == []
    assert panel.canonical(made) == CONTENT


def test_the_licences_of_the_packages_lie_beside_the_panel():
    text = panel.LICENCES.read_text(encoding="utf-8")
    assert text == panel.licences()
    used = {(e["package"], e["version"]) for e in EXCERPTS}
    assert set(re.findall(r"^## (\w+) ([\d.]+) \(", text, re.MULTILINE)) == used


def test_a_text_too_short_for_a_window_is_an_error():
    with pytest.raises(ValueError, match="brief: 1023 tokens, expected 1024"):
        panel._whole([1] * 1023, "brief")


def test_the_short_panel_is_the_beginning_of_six_windows():
    content = lzma.decompress(panel.SHORT_FILE.read_bytes())
    assert hashlib.sha256(content).hexdigest() == SHORT_SHA256
    cut = json.loads(content)
    assert panel.canonical(cut) == content == panel.canonical(panel.short(DOCUMENT))
    assert (cut["name"], cut["tokenizer_sha256"]) == ("nano-short", DOCUMENT["tokenizer_sha256"])
    whole = {w["id"]: w for w in WINDOWS}
    assert len(cut["windows"]) == 6
    for window in cut["windows"]:
        source = whole[window["id"]]
        assert window == {**source, "token_ids": source["token_ids"][:256]}
    assert Counter(w["domain"] for w in cut["windows"]) == {"prose": 1, "code": 1, "chat": 4}
    # A conversation is there for its replies: at least one of the model's is whole.
    for window in cut["windows"]:
        if window["domain"] == "chat":
            turns = TOKENS.decode(window["token_ids"], skip_special_tokens=False).split("<|user|>")
            assert sum("<|assistant|>" in turn for turn in turns[1:-1]) >= 1


# -- the rules ------------------------------------------------------------------------------------


def test_there_are_25_different_windows_of_1024_scored_tokens():
    assert [len(w["token_ids"]) for w in WINDOWS] == [1024] * 25
    assert len({tuple(w["token_ids"]) for w in WINDOWS}) == 25
    assert len({w["document"] for w in WINDOWS}) == 25
    assert Counter(w["domain"] for w in WINDOWS) == {
        "prose": 5, "code": 5, "languages": 2, "chat": 9, "tools": 2, "retrieval": 2,
    }  # fmt: skip
    used = {token for w in WINDOWS for token in w["token_ids"]}
    assert not used & {TOKEN["<|image|>"], TOKEN["<|video|>"], TOKEN["<|endoftext|>"]}


def test_every_skill_without_pictures_has_one_to_three_windows():
    named = {s.case if s.length else s.name for s in SKILLS if not s.name.startswith("vi")}
    assert named == set(SIGNS)
    counts = {
        skill: sum(bool(re.search(sign, TEXT[name], re.DOTALL)) for name in TALKS)
        for skill, sign in SIGNS.items()
    }
    assert {skill: n for skill, n in counts.items() if not 1 <= n <= 3} == {}


def test_languages_are_of_many_scripts():
    letters = Counter(
        unicodedata.name(letter).split()[0]
        for w in WINDOWS
        if w["domain"] == "languages"
        for letter in TEXT[w["document"]]
        if letter.isalpha()
    )
    assert {script: letters[script] for script in SCRIPTS if letters[script] < 15} == {}


def test_plain_windows_hold_text_alone_and_the_others_begin_as_a_conversation():
    for w in WINDOWS:
        markers = [token for token in w["token_ids"] if token >= FIRST_SPECIAL]
        if w["domain"] in PLAIN:
            assert markers == []
        else:
            assert markers[:3] == [TOKEN["[gMASK]"], TOKEN["<sop>"], TOKEN["<|system|>"]]
            assert w["token_ids"][:2] == markers[:2]


@pytest.mark.parametrize("name", [talk.document for talk in panel.TALKS])
def test_a_conversation_is_what_the_product_would_send(name):
    text = TEXT[name]
    before, *turns = text.split("<|user|>")
    _, effort, *system = before.split("<|system|>")
    messages = [{"role": "system", "content": words} for words in system]
    for turn in turns[:-2]:
        user, _, reply = turn.partition("<|assistant|><think>")
        thought, _, reply = reply.partition("</think>")
        messages.append({"role": "user", "content": user})
        messages.append({"role": "assistant", "content": reply, "reasoning_content": thought})
    messages.append({"role": "user", "content": turns[-2].partition("<|assistant|>")[0]})
    effort = effort.removeprefix("Reasoning Effort: ").lower()
    rendered = ChatTemplate.open(NANO).render(messages, reasoning_effort=effort)
    assert text.startswith(rendered)
    assert len(rendered) > 0.8 * len(text)
    ids = ProductTokenizer.open(NANO).encode_template(
        ChatTemplate.open(NANO).render_text(messages, None, True, reasoning_effort=effort)
    )
    window = next(w["token_ids"] for w in WINDOWS if w["document"] == name)
    assert window[: len(ids)] == ids


def test_part_of_the_requests_are_worded_as_training_never_says_them():
    said = [part.partition("<|assistant|>")[0] for part in TEXT["chat"].split("<|user|>")[1:-1]]
    held_out = {way for talk in small_talk() for way in talk.wordings.held_out}
    assert 0.2 < sum(text in held_out for text in said) / len(said) < 0.6


# -- seen by nobody before ------------------------------------------------------------------------


@pytest.mark.parametrize("purpose", [p for p in Purpose if p != Purpose.PANEL])
def test_no_other_purpose_makes_the_same_window(purpose):
    others = {w.document: list(w.token_ids) for w in panel.Talks(TOKENS, purpose).windows()}
    assert set(others) == set(TALKS)
    mine = {w["document"]: w["token_ids"] for w in WINDOWS if w["document"] in others}
    for name, ids in others.items():
        # After the head there is no place where both are the same for long.
        same = np.array(ids) == np.array(mine[name])
        assert same[100:].mean() < 0.5, name


def test_no_long_run_of_tokens_stands_in_the_calibration_text():
    ids = load_calibration(NANO, None, 10_000, 64, 0).token_ids.flatten().tolist()
    assert len(ids) > 80_000
    found = {
        length: {w["document"] for w in WINDOWS if runs(w["token_ids"], length) & known}
        for length, known in ((32, runs(ids, 32)), (64, runs(ids, 64)))
    }
    assert not {w["document"] for w in WINDOWS if w["domain"] in PLAIN} & found[32]
    # There is one way to count to 49, to write a known function, and to introduce tools.
    assert found[64] == {"counting", "by_heart", "tools_1", "tools_2"}


def test_windows_share_no_long_run_but_the_head_of_tools():
    seen = {}
    for w in WINDOWS:
        mine = runs(w["token_ids"], 32)
        met = {name for name, theirs in seen.items() if mine & theirs}
        assert met <= ({"tools_1"} if w["document"] == "tools_2" else set()), w["document"]
        seen[w["document"]] = mine


def test_excerpts_are_of_held_out_packages_with_their_licence_and_of_ten_files():
    packages = {package.name: package for package in read_packages()}
    for e in EXCERPTS:
        package = packages[e["package"]]
        assert package.held_out, package.name
        assert (package.version, package.licence) == (e["version"], e["licence"])
        assert e["licence"] in ("MIT", "BSD-3-Clause")
        assert forbidden(e["text"]) is None
    assert len({(e["package"], e["path"]) for e in EXCERPTS}) == len(EXCERPTS) == 10


def test_excerpts_do_not_stand_in_the_training_text_nor_among_the_other_excerpts():
    texts = [e["text"] for e in EXCERPTS]
    found = Sketch.read(SKETCH).check(TOKENS, texts)
    assert found.lines > 3
    assert (found.lines_found, found.runs_found) == (0, 0)
    # The long texts of retrieval are lines of these, and evaluation predicts them.
    others = Index.of(TOKENS, [held_out_text(kind) for kind in KINDS])
    met = check(others, TOKENS, texts)
    assert met.lines_found == 0
    assert met.runs_found < 0.005 * met.runs


@pytest.mark.slow
@pytest.mark.timeout(1200)  # all of 107 MB is read
def test_excerpts_share_no_line_and_no_run_with_the_whole_training_text():
    if not all((CORPUS / f"{kind}.txt.xz").is_file() for kind in KINDS):
        pytest.skip("no corpus here; `python -m training.corpus` makes it")
    documents = [d for kind in KINDS for d in read_documents(CORPUS / f"{kind}.txt.xz")]
    batches = (documents[i : i + 1000] for i in range(0, len(documents), 1000))
    found = check(Index.of(TOKENS, batches), TOKENS, [e["text"] for e in EXCERPTS])
    assert found.lines > 300
    assert found.runs > 9000
    assert (found.lines_found, found.runs_found) == (0, 0)


@pytest.mark.slow
def test_an_excerpt_is_consecutive_text_of_the_file_it_names():
    packages = {package.name: package for package in read_packages()}
    for e in EXCERPTS:
        path = ARCHIVES / packages[e["package"]].file
        if not path.is_file():
            pytest.skip(f"{path.name} is not here; `python -m training.corpus` downloads it")
        found = Extract()
        for name, content in read_archive(path):
            if name.partition("/")[2] == e["path"]:
                plain = _plain(content)
                assert plain is not None
                _take(found, name, plain)
        assert any(e["text"] in document for document in getattr(found, e["kind"])), e["path"]
