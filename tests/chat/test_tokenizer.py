import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberbox.chat.template_text import Run, TemplateText
from emberbox.chat.tokenizer import Tokenizer
from emberbox.errors import CheckpointError, RequestError

TEXTS = (
    "",
    "Count from 3 to 9.",
    "  blanks  \n\n\tand lines\r\n",
    "中文和English混排，标点。",
    "e\u0301 n\u0303 👩‍👩‍👧‍👦 🇩🇪 \U0001f600!",
    "x" * 1001,
    "a\x00b\ufffd\ufdd0c",
)


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_has_the_librarys_ids_and_comes_back(tokenizer, library_tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == library_tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


def test_special_tokens_in_plain_text_stay_plain(tokenizer):
    special = set(tokenizer.special_tokens.values())
    assert len(special) == 36
    for name in tokenizer.special_tokens:
        ids = tokenizer.encode(f"a{name}b{name}")
        assert special.isdisjoint(ids), name
        assert tokenizer.decode(ids) == f"a{name}b{name}"


def test_trusted_text_has_the_librarys_ids(tokenizer, library_tokenizer):
    text = "[gMASK]<sop><|system|>Reasoning Effort: Low<|user|> Hi\n<|assistant|><think></think>中"
    ids = tokenizer.encode_template(text)
    assert ids == library_tokenizer.encode(text, add_special_tokens=False).ids
    assert ids[:3] == [4058, 4060, 4062]


def test_runs_decide_what_is_special_not_their_spelling(tokenizer):
    runs = TemplateText((Run("<|user|>", True), Run("<|user|>", False)))
    ids = tokenizer.encode_template(runs)
    assert ids[0] == 4063
    assert ids[1:] == tokenizer.encode("<|user|>")
    assert 4063 not in ids[1:]


def test_decode_hides_special_tokens_but_for_those_kept(tokenizer):
    ids = tokenizer.encode_template("<|assistant|><think>a</think>b<|user|>")
    assert tokenizer.decode(ids) == "<think>a</think>b"
    assert tokenizer.decode(ids, keep=()) == "ab"
    assert tokenizer.decode(ids, keep={4063}) == "ab<|user|>"


@given(st.lists(st.integers(0, 4095), max_size=40))
def test_decode_of_any_ids_equals_the_library(tokenizer, library_tokenizer, ids):
    expected = library_tokenizer.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, keep=()) == expected


def test_decode_at_the_edges(tokenizer):
    assert tokenizer.vocab_size == 4092
    assert tokenizer.decode([4092, 4095, 10**9]) == ""
    with pytest.raises(RequestError, match="-1 is negative"):
        tokenizer.decode([5, -1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\ud83d", "a\ufffd"), ("\ud83d\ude00", "\U0001f600"), ("\ude00\ud83d", "\ufffd\ufffd")],
)
def test_half_surrogates_become_replacement_characters(tokenizer, text, expected):
    assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_unknown_special_token_is_named(tokenizer):
    assert tokenizer.special_id("</think>") == 4078
    with pytest.raises(CheckpointError, match=r"no special token '<\|sop\|>'"):
        tokenizer.special_id("<|sop|>")


def test_markup_ids_are_those_a_reply_is_parsed_by(tokenizer):
    assert tokenizer.markup_ids == {4077, 4078, 4079, 4080, 4083, 4084, 4085, 4086}


@pytest.fixture
def nano_document(nano_folder):
    return json.loads((nano_folder / "tokenizer.json").read_text(encoding="utf-8"))


def _open(folder, document):
    (folder / "tokenizer.json").write_text(
        document if isinstance(document, str) else json.dumps(document), encoding="utf-8"
    )
    return Tokenizer.open(folder)


def test_missing_file_is_refused_by_path(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not there"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ('{"model": ', "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "expected a BPE model, found None"),
        ({"model": {"type": "Unigram"}}, "found 'Unigram'"),
        ({"model": {"type": "BPE"}, "decoder": {"type": "Metaspace"}}, "found 'Metaspace'"),
        ({"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}, "library refuses it"),
        ({"added_tokens": {}}, "added_tokens is no list"),
        ({"added_tokens": [{"id": "1", "content": "x"}]}, r"added_tokens\[0\] lacks"),
    ],
)
def test_broken_files_are_refused(tmp_path, document, message):
    with pytest.raises(CheckpointError, match=message):
        _open(tmp_path, document)


def test_tokens_that_eat_blanks_are_refused(tmp_path, nano_document):
    nano_document["added_tokens"][3]["lstrip"] = True
    with pytest.raises(CheckpointError, match=r"added_tokens\[3\].*lstrip"):
        _open(tmp_path, nano_document)


def test_one_added_token_twice_is_refused(tmp_path, nano_document):
    nano_document["added_tokens"][3]["id"] = nano_document["added_tokens"][2]["id"]
    with pytest.raises(CheckpointError, match=r"added_tokens\[3\].*twice"):
        _open(tmp_path, nano_document)


def test_a_word_that_plain_text_can_reach_must_not_be_an_added_token(tmp_path, nano_document):
    word = "the"
    token_id = nano_document["model"]["vocab"][word]
    nano_document["added_tokens"].append({"id": token_id, "content": word, "special": True})
    with pytest.raises(CheckpointError, match="'the' is an added token and a word"):
        _open(tmp_path, nano_document)


def test_added_tokens_count_as_special_whatever_their_flag(tmp_path, nano_document):
    for entry in nano_document["added_tokens"]:
        entry["special"] = False
    tokenizer = _open(tmp_path, nano_document)
    assert 4078 not in tokenizer.encode("</think>")
    assert tokenizer.decode([4063, 4078], keep=()) == ""


@pytest.mark.parametrize("token_id", [2**24, 2**31, 2**60])
def test_a_token_id_that_would_need_a_huge_table_is_refused(tmp_path, nano_document, token_id):
    nano_document["added_tokens"][3]["id"] = token_id
    with pytest.raises(CheckpointError, match=rf"added_tokens\[3\].*{token_id}"):
        _open(tmp_path, nano_document)


def test_a_word_id_that_would_need_a_huge_table_is_refused(tmp_path, nano_document):
    nano_document["model"]["vocab"]["the"] = 2**24
    with pytest.raises(CheckpointError, match="'the' has id 16777216"):
        _open(tmp_path, nano_document)


def test_an_added_token_must_not_share_the_id_of_another_word(tmp_path, nano_document):
    token_id = nano_document["model"]["vocab"]["the"]
    nano_document["added_tokens"][3]["id"] = token_id
    with pytest.raises(CheckpointError, match=rf"id {token_id} is the added token .*word 'the'"):
        _open(tmp_path, nano_document)
