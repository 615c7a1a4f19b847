import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberbox.chat.template_text import MARKS, Run, TokenGuard, remove_mark
from emberbox.errors import RequestError

TOKENS = ("<think>", "</think>", "<|user|>", "[gMASK]", "<sop>", "ab", "bc", "<|user|>x")
GUARD = TokenGuard(TOKENS)
MARK = MARKS[0]

pieces = st.lists(
    st.one_of(
        st.sampled_from(
            ["<", "<|", "us", "er|>", "<think", ">", "think>", "a", "b", "c", " ", "["]
        ),
        st.sampled_from(TOKENS),
        st.text(max_size=3),
    ),
    max_size=8,
).map("".join)


@given(st.lists(pieces, max_size=4))
def test_protected_pieces_side_by_side_hold_no_special_token(parts):
    # Two pieces never touch without a border of their own, whatever they hold.
    text = GUARD.runs("".join(GUARD.protect(part, MARK) for part in parts), MARK)
    assert all(not run.is_special for run in text.runs)
    assert text.text == "".join(parts).replace(MARK, "")
    assert len(text.runs) <= 1


def test_special_tokens_of_the_template_are_found_between_protected_text():
    inner = GUARD.protect("x<think>y", MARK)
    text = GUARD.runs(f"<|user|>{inner}</think>", MARK)
    assert text.runs == (
        Run("<|user|>", True),
        Run("x<think>y", False),
        Run("</think>", True),
    )
    assert text.count("<think>") == 0
    assert not text.starts_in_reasoning


def test_the_longer_of_two_tokens_is_meant():
    assert GUARD.runs("<|user|>x<|user|>").runs == (Run("<|user|>x", True), Run("<|user|>", True))


def test_text_without_anything_like_a_token_is_untouched():
    for text in ("", "  ", "plain", "p < d", " user ", "5 [x]"):
        assert GUARD.protect(text, MARK) == text


def test_outer_blanks_stay_outermost():
    protected = GUARD.protect(" \n<|us \n", MARK)
    assert protected.strip() == f"<|us{MARK}"
    assert GUARD.protect("\ter|> ", MARK) == f"\t{MARK}er|> "


def test_the_mark_occurs_nowhere_in_the_request():
    value = {"a": [f"x{MARKS[0]}", {f"{MARKS[1]}": (MARKS[2], 7, None)}]}
    assert GUARD.choose_mark(value) == MARKS[3]
    assert GUARD.choose_mark([]) == MARKS[0]
    with pytest.raises(RequestError, match="32 Unicode non-characters"):
        GUARD.choose_mark(["".join(MARKS)])


def test_protection_reaches_every_string_and_can_be_undone():
    value = {"<sop>": ["<think>", {"k": "<|user|>"}], "n": 3, "t": ("[gMASK]",)}
    protected = GUARD.protect_all(value, MARK)
    assert "<sop>" not in protected
    assert protected["t"][0] != "[gMASK]"
    assert remove_mark(protected, MARK) == {**value, "t": ["[gMASK]"]}


def test_a_guard_without_tokens_finds_none():
    assert TokenGuard(()).runs("<think>").runs == (Run("<think>", False),)


def test_tokens_that_overlap_or_hold_one_another_are_all_broken():
    for text in ("abc", "xabcab", "<|user|>xab", "[gMASK]abbc"):
        runs = GUARD.runs(GUARD.protect(text, MARK), MARK).runs
        assert runs == (Run(text, False),)
