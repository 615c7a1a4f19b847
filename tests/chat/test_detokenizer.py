import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberbox.chat.detokenizer import Detokenizer

TEXTS = (
    "Plain words, 12 of them.\n",
    "汉字与emoji👩🏽‍🚀混排 – e\u0301a\u0308o\u0302 \u200d x",
    "한국어 日本語 עברית ไทย 🇩🇪🏴‍☠️",
    "<think>a</thin</thinking>",
)

# Every single byte is a token, so any byte sequence can be spelled.
INVALID = (
    b"\xf0\x9fA",
    b"\xf0\x9f\x98",
    b"\xe0\x80\x80",
    b"\xed\xa0\x80x",
    b"\xff\xfe\xc3",
    b"\xc3\xc3\xa9\xe4\xb8",
    b"\xf4\x90\x80\x80",
    b"\x80\x80\xe2\x82",
)


@pytest.fixture(scope="module")
def id_of_byte(tokenizer):
    table = {}
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token_id)
        if len(data) == 1:
            table[data[0]] = token_id
    assert len(table) == 256
    return table


def streamed(tokenizer, ids, cuts, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    edges = [0, *sorted(cuts), len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(edges)]
    return "".join(pieces) + detokenizer.finish()


@pytest.mark.parametrize("text", TEXTS)
def test_every_split_of_real_text_equals_the_text(tokenizer, id_of_byte, text):
    for ids in (tokenizer.encode(text), [id_of_byte[b] for b in text.encode()]):
        for cut in range(len(ids) + 1):
            assert streamed(tokenizer, ids, [cut]) == text
        assert streamed(tokenizer, ids, range(len(ids))) == text


@pytest.mark.parametrize("data", INVALID)
def test_invalid_bytes_give_what_the_full_decode_gives(
    tokenizer, library_tokenizer, id_of_byte, data
):
    ids = [id_of_byte[byte] for byte in data]
    expected = library_tokenizer.decode(ids, skip_special_tokens=True)
    assert "\ufffd" in expected
    assert tokenizer.decode(ids) == expected
    for cut in range(len(ids) + 1):
        assert streamed(tokenizer, ids, [cut]) == expected
    assert streamed(tokenizer, ids, range(len(ids))) == expected


@given(st.lists(st.integers(0, 4095), max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_any_ids_in_any_split_equal_the_full_decode(tokenizer, library_tokenizer, ids, cuts):
    cuts = [min(cut, len(ids)) for cut in cuts]
    assert streamed(tokenizer, ids, cuts) == tokenizer.decode(ids)
    expected = library_tokenizer.decode(ids, skip_special_tokens=True)
    assert streamed(tokenizer, ids, cuts, keep=()) == expected


@given(st.binary(max_size=24), st.integers(0, 2**24 - 1))
def test_any_bytes_in_any_split_equal_the_full_decode(tokenizer, id_of_byte, data, mask):
    ids = [id_of_byte[byte] for byte in data]
    cuts = [i for i in range(len(ids)) if mask >> i & 1]
    assert streamed(tokenizer, ids, cuts) == data.decode("utf-8", "replace")


def test_a_cut_emoji_is_held_back_and_then_whole_or_one_replacement(tokenizer, id_of_byte):
    first, second, third, fourth = (id_of_byte[byte] for byte in "😀".encode())
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in (first, second, third)] == ["", "", ""]
    assert detokenizer.push([fourth]) == "😀"
    assert detokenizer.finish() == ""
    detokenizer.push([first, second])
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push(tokenizer.encode("ok")) == "ok"


def test_markup_is_shown_and_other_special_tokens_are_not(tokenizer):
    ids = tokenizer.encode_template("a</think>b<|user|>")
    assert Detokenizer(tokenizer).push(ids) == "a</think>b"
    assert Detokenizer(tokenizer, keep=()).push(ids) == "ab"
    assert Detokenizer(tokenizer, keep=[4063]).push(ids) == "ab<|user|>"


def test_a_copy_goes_its_own_way(tokenizer, id_of_byte):
    detokenizer = Detokenizer(tokenizer, keep=())
    start, end = (id_of_byte[byte] for byte in "é".encode())
    detokenizer.push([start])
    draft = detokenizer.copy()
    assert draft.push([id_of_byte[0x41], 4078]) == "\ufffdA"
    assert detokenizer.push([end]) == "é"


def test_long_streams_cost_no_more_per_token(tokenizer):
    # 60,000 tokens would take minutes if each one looked at the text so far.
    ids = [random.Random(5).randrange(4056) for _ in range(60_000)]
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish()
    assert text == tokenizer.decode(ids)
