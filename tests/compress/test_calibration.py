"""Calibration: how text becomes rows, what is refused, and what the shipped text may not hold."""

import hashlib
import json
import logging
import re
import tomllib
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as LibraryTokenizer

from emberbox.chat.template import ChatTemplate
from emberbox.chat.tokenizer import Tokenizer
from emberbox.compress import calibration
from emberbox.compress.calibration import SHIPPED, load_calibration
from emberbox.errors import CheckpointError, SettingsError
from emberbox.measure.panel import Window
from training import calibration as generator
from training.data.cases import CaseMaker
from training.data.seeds import Purpose, stream
from training.data.tables import held_out_text, small_talk, wordings
from training.data.text import KINDS, held_out
from training.data.turns import Dice, head

ROOT = Path(__file__).parents[2]
NANO = ROOT / "models" / "ember-nano"
TOKENS = Tokenizer.open(NANO)
START = TOKENS.special_id("<|endoftext|>")
TALK = [
    {"role": "user", "content": "Is <|user|> a token?"},
    {"role": "assistant", "content": "Not here.", "reasoning_content": "It is a word."},
]


def write(path: Path, *lines: object) -> Path:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8", newline="")
    return path


def flat(source: Path, count: int) -> list[int]:
    """The first `count` ids: as many rows of one token."""
    return load_calibration(NANO, source, count, 1, 0).token_ids[:, 0].tolist()


# -- from text to rows ----------------------------------------------------------------------------


def test_rows_are_the_documents_one_after_another(tmp_path):
    (tmp_path / "b.md").write_text("Second, with an é.", encoding="utf-8")
    (tmp_path / "a.txt").write_text("First.\r\nTwo lines.\n", encoding="utf-8", newline="")
    write(tmp_path / "c.jsonl", {"text": "Third.", "id": 3}, {"text": ""}, {"text": "4\u2028th"})
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    said = ("First.\r\nTwo lines.\n", "Second, with an é.", "Third.", "4\u2028th")
    ids = [token for text in said for token in (START, *TOKENS.encode(text))]
    made = load_calibration(NANO, tmp_path, len(ids) // 3, 3, 5)
    assert made.token_ids.dtype == torch.int64
    assert made.token_ids.tolist() == [ids[i : i + 3] for i in range(0, len(ids) - 2, 3)]
    assert made.source == tmp_path.name
    files = [(tmp_path / name).read_bytes() for name in ("a.txt", "b.md", "c.jsonl")]
    assert made.sha256 == hashlib.sha256(b"".join(files)).hexdigest()


def test_one_row_is_taken_of_each_stretch(tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_text(" ".join(map(str, range(400))), encoding="utf-8")
    ids = [START, *TOKENS.encode(path.read_text())]
    rows = [ids[i : i + 10] for i in range(0, len(ids) - 9, 10)]
    seen = set()
    for seed in range(20):
        made = load_calibration(NANO, path, 4, 10, seed).token_ids.tolist()
        assert made == load_calibration(NANO, path, 4, 10, seed).token_ids.tolist()
        places = [rows.index(row) for row in made]
        edges = [i * len(rows) // 4 for i in range(5)]
        assert all(a <= at < b for a, at, b in zip(edges, places, edges[1:], strict=False))
        seen.add(tuple(places))
    assert len(seen) > 10


def test_a_short_text_gives_the_rows_it_has_and_says_so(tmp_path, caplog):
    path = tmp_path / "short.txt"
    path.write_text("one two three four five six seven", encoding="utf-8")
    count = 1 + len(TOKENS.encode(path.read_text()))
    with caplog.at_level(logging.WARNING):
        made = load_calibration(NANO, path, 1000, 2, 0)
    assert made.token_ids.shape == (count // 2, 2)
    assert f"short.txt holds {count // 2} rows of 2 tokens, not 1000" in caplog.text


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    path = tmp_path / "bom.txt"
    path.write_bytes(b"\xef\xbb\xbfwords")
    words = TOKENS.encode("words")
    assert flat(path, 1 + len(words)) == [START, *words]


def test_a_tokenizer_without_the_document_mark_needs_none(tmp_path):
    raw = json.loads((NANO / "tokenizer.json").read_text(encoding="utf-8"))
    raw["added_tokens"] = [t for t in raw["added_tokens"] if t["content"] != "<|endoftext|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    path = tmp_path / "text.txt"
    path.write_text("words", encoding="utf-8")
    made = load_calibration(tmp_path, path, 1, len(TOKENS.encode("words")), 0)
    assert made.token_ids[0].tolist() == TOKENS.encode("words")


# -- special tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_plain_text_never_becomes_a_special_token(tmp_path, kind):
    text = "<|user|>Hi<|assistant|><think></think>[gMASK]<sop><|endoftext|>"
    path = tmp_path / f"text.{kind}"
    path.write_text(text if kind == "txt" else json.dumps({"text": text}), encoding="utf-8")
    ids = flat(path, 1 + len(TOKENS.encode(text)))
    assert ids == [START, *TOKENS.encode(text)]
    assert not set(ids[1:]) & set(TOKENS.special_tokens.values())


def test_messages_are_what_the_template_makes_of_them(tmp_path):
    tools = [{"name": "f", "description": "d", "parameters": {"type": "object"}}]
    line = {"messages": TALK, "tools": tools, "reasoning_effort": "high", "source": "mine"}
    text = ChatTemplate.open(NANO).render_text(TALK, tools, False, reasoning_effort="high")
    expected = TOKENS.encode_template(text)
    assert flat(write(tmp_path / "a.jsonl", line), len(expected)) == expected
    users = [i for i in expected if i == TOKENS.special_id("<|user|>")]
    assert len(users) == 1
    assert expected[0] == TOKENS.special_id("[gMASK]")
    assert text.text.endswith("<think>It is a word.</think>Not here.")


# -- refusals -------------------------------------------------------------------------------------

PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
BAD_LINES = {
    "not JSON": "{",
    "does not start with": "[1]",
    'expected "messages", or "text"': '{"prompt": "x"}',
    '"text" with a string': '{"text": 5}',
    "the list is empty": '{"messages": []}',
    "'robot' is unknown": '{"messages": [{"role": "robot", "content": "x"}]}',
    "reasoning_effort: 'much'": json.dumps({"messages": TALK, "reasoning_effort": "much"}),
    "tools: expected a list": json.dumps({"messages": TALK, "tools": 7}),
    "calibration takes text alone": json.dumps({"messages": PICTURE}),
    "stands twice": '{"text": "a", "text": "b"}',
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_bad_line_is_named_by_its_number(tmp_path, reason):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "fine"}\n\n' + BAD_LINES[reason] + "\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"lines\.jsonl, line 3: ") as caught:
        load_calibration(NANO, path, 1, 1, 0)
    assert reason in str(caught.value)


def test_what_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch):
    def refused(source: Path, rows: int = 1, cols: int = 8) -> str:
        with pytest.raises(SettingsError) as caught:
            load_calibration(NANO, source, rows, cols, 0)
        return str(caught.value)

    assert "nowhere.txt: not there" in refused(tmp_path / "nowhere.txt")
    assert f"{tmp_path}: no .jsonl, .md, .txt file" in refused(tmp_path)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("für".encode("latin-1"))
    assert "latin.txt: not UTF-8 at byte 1" in refused(latin)
    (tmp_path / "table.csv").write_text("a,b")
    assert "table.csv: expected .jsonl, .md, .txt" in refused(tmp_path / "table.csv")
    short = tmp_path / "short.md"
    short.write_text("one two")
    count = 1 + len(TOKENS.encode("one two"))
    assert f"short.md: {count} tokens of calibration text; one row needs 9" in refused(short, 3, 9)
    assert "0 rows of 8 tokens" in refused(short, 0)
    assert "1 rows of 0 tokens" in refused(short, 1, 0)
    (tmp_path / "empty.txt").write_text("")
    assert "0 tokens" in refused(tmp_path / "empty.txt")
    monkeypatch.setattr(calibration, "MAX_TEXT_BYTES", 6)
    assert "7 bytes of calibration text; at most 6" in refused(short)


def test_a_folder_without_tokenizer_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_calibration(tmp_path, None, 1, 1, 0)


def test_a_template_is_needed_for_messages_only(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((NANO / "tokenizer.json").read_bytes())
    words = write(tmp_path / "words.jsonl", {"text": "words"})
    assert load_calibration(tmp_path, words, 1, 2, 0).token_ids[0, 0] == START
    with pytest.raises(CheckpointError, match="no chat template"):
        load_calibration(tmp_path, write(tmp_path / "talk.jsonl", {"messages": TALK}), 1, 1, 0)


# -- the shipped text -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped() -> dict[str, str]:
    return {p.name: p.read_text(encoding="utf-8") for p in sorted(SHIPPED.iterdir())}


@pytest.fixture(scope="module")
def lines(shipped) -> list[dict]:
    return [json.loads(line) for line in shipped["conversations.jsonl"].splitlines()]


@pytest.fixture(scope="module")
def talks(lines) -> list[list[str]]:
    """What the user says, conversation by conversation."""
    return [[m["content"] for m in line["messages"] if m["role"] == "user"] for line in lines]


@pytest.fixture(scope="module")
def all_text(shipped, lines) -> str:
    """Prose as it stands, and every message as it is read rather than as JSON shows it."""
    said = [str(message["content"]) for line in lines for message in line["messages"]]
    return "\n".join(
        [*said, *(text for name, text in shipped.items() if name != "conversations.jsonl")]
    )


def test_the_generator_gives_the_shipped_conversations(shipped):
    """They depend on the tables: after a change there, run `python -m training.calibration`."""
    assert generator.conversations() == shipped["conversations.jsonl"]


def test_conversations_render_to_what_training_shows_the_model():
    dice = Dice(stream(Purpose.CALIBRATION, "test"))
    nobody = generator.Evaluated(frozenset(), frozenset(), ())
    writer = generator.Writer(dice, [f"Filler line {i}.\n" for i in range(60)], nobody)
    template = ChatTemplate.open(NANO)
    for _ in range(60):
        made = writer.conversation()
        line = json.loads(json.dumps(made.as_json()))
        text = head(made.effort, made.system, made.tools)
        text += "".join(turn.prompt + turn.answer(made.effort) for turn in made.turns)
        effort = line["reasoning_effort"]
        shown = template.render(line["messages"], line.get("tools"), False, reasoning_effort=effort)
        assert shown == text


def test_the_shipped_text_is_small_and_half_of_it_conversations(shipped):
    assert sum(len(text.encode()) for text in shipped.values()) < 300_000
    made = load_calibration(NANO, None, 10_000, 64, 0)
    assert made.source == "the shipped text"
    assert made.token_ids[0, :2].tolist() == [
        TOKENS.special_id("[gMASK]"),
        TOKENS.special_id("<sop>"),
    ]
    talk = load_calibration(NANO, SHIPPED / "conversations.jsonl", 10_000, 64, 0)
    assert 0.4 < talk.token_ids.numel() / made.token_ids.numel() < 0.6
    assert made.token_ids.numel() > 80_000
    for name in ("<think>", "<tool_call>", "<tool_response>", "<|observation|>"):
        assert (made.token_ids == TOKENS.special_id(name)).sum() >= 20, name


def test_the_shipped_text_is_part_of_the_package(shipped):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["emberbox"]
    package = SHIPPED.parents[1]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert {SHIPPED / name for name in shipped} <= packed


def test_the_rows_that_were_chosen_have_a_hash_of_their_own():
    one, same, other = (load_calibration(NANO, None, 3, 7, seed) for seed in (0, 0, 1))
    assert one.sha256 == other.sha256
    assert one.rows_sha256 == same.rows_sha256 != other.rows_sha256
    ids = [token for row in one.token_ids.tolist() for token in row]
    raw = b"".join(token.to_bytes(8, "little") for token in ids)
    assert one.rows_sha256 == hashlib.sha256(raw).hexdigest()
    window = Window("w", "d", "x", tuple(ids))
    assert one.rows_sha256 == window.token_sha256()  # so that a receipt's two hashes compare


# -- nothing that is evaluated --------------------------------------------------------------------


def held_out_ways() -> list[str]:
    ways = [way for each in wordings().values() for way in each.held_out]
    return ways + [way for talk in small_talk() for way in talk.wordings.held_out]


def pattern_of(way: str) -> tuple[str, re.Pattern[str]]:
    """The longest of its own words, and a pattern for all of it."""
    parts = re.split(r"\{\w+\}", way)
    return max(parts, key=len), re.compile(r"[^\n]{1,60}?".join(map(re.escape, parts)))


def test_no_held_out_wording_is_said(talks, all_text):
    said = [text for talk in talks for text in talk]
    for way in held_out_ways():
        longest, pattern = pattern_of(way)
        assert not [text for text in said if pattern.fullmatch(text)], way
        if len(longest) >= 12 and longest in all_text:
            assert pattern.search(all_text) is None, way


def test_a_held_out_wording_would_be_found():
    _, pattern = pattern_of("Could you count aloud from {a} to {b}?")
    assert pattern.search("Hm. Could you count aloud from 3 to 90? Yes.")


@pytest.fixture(scope="module")
def evaluated() -> generator.Evaluated:
    return generator.evaluated()


def test_no_evaluated_request_is_asked(talks, all_text, evaluated):
    assert len(evaluated.requests) > 3000
    assert len(evaluated.talks) > 300
    assert not {text for talk in talks for text in talk} & evaluated.requests
    assert not [text for text in evaluated.requests if len(text) >= 16 and text in all_text]
    for talk in talks:
        runs = {tuple(talk[i:j]) for i in range(len(talk)) for j in range(i + 2, i + 6)}
        assert not runs & evaluated.talks


def test_evaluated_items_are_recognised(evaluated):
    made = CaseMaker(LibraryTokenizer.from_file(str(NANO / "tokenizer.json")), None)
    assert made.purpose == Purpose.EVALUATION
    shown = TOKENS.decode(made.case("sums", 7).prompt.tolist())
    asked = next(text for text in evaluated.requests if shown.endswith(text + "<think>"))
    assert evaluated.holds([generator.Turn("sums", f"Please: {asked}", "0")]) == (len(asked) >= 16)
    assert evaluated.holds([generator.Turn("sums", asked, "0")])
    assert not evaluated.holds([generator.Turn("sums", "What is one and one and one?", "3")])
    assert evaluated.holds([generator.Turn("tool_call", "Do it. Please tell me more.", "")])
    told = [generator.Turn("told", text, "Noted.") for text in sorted(evaluated.talks)[0]]
    assert evaluated.holds(told)
    assert not evaluated.holds(told[1:])


def test_no_line_of_a_held_out_text_or_of_an_evaluated_document_occurs(all_text):
    ours = {line.strip() for line in all_text.split("\n") if len(line.strip()) >= 30}
    theirs = {
        line.strip() for kind in KINDS for text in held_out_text(kind) for line in text.split("\n")
    }
    assert len(ours) > 1000
    assert not ours & theirs
    library = LibraryTokenizer.from_file(str(NANO / "tokenizer.json"))
    maker = CaseMaker(library, held_out(library))
    for skill in ("retrieval", "retrieval_hard"):
        for i in range(30):
            shown = TOKENS.decode(maker.case(skill, i, 1000).prompt.tolist())
            assert not ours & {line.strip() for line in shown.split("\n")}
