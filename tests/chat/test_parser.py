import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberbox.chat.parser import ReasoningParser, StopMatcher, split_reasoning
from emberbox.errors import RequestError


def run(parser, pieces):
    deltas = [*(parser.push(piece) for piece in pieces), parser.finish()]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)


CASES = (
    # thinking, raw, reasoning, content
    (True, "why</think>Paris.", "why", "Paris."),
    (True, "</think>Paris.", "", "Paris."),
    (True, "<think>why</think>Paris.", "why", "Paris."),
    (True, "\n<think>\nwhy</think>\n\nParis.", "\nwhy", "\n\nParis."),
    (True, "a</thinking>b</thin c</think", "a</thinking>b</thin c</think", ""),
    (True, "a</thinking></think>b</think>c<think>d", "a</thinking>", "b</think>c<think>d"),
    (True, "a<</think>b", "a<", "b"),
    (True, "a</</think>b", "a</", "b"),
    (True, "a<think>b</think>c", "a<think>b", "c"),
    (True, "a</think></think>b", "a", "b"),
    (True, "a</think>\n</think>b", "a", "\nb"),
    (True, "a</think><think>b", "a", "<think>b"),
    (True, " ", " ", ""),
    (True, "", "", ""),
    (False, "Paris.", "", "Paris."),
    (False, "</think>Paris.", "", "Paris."),
    (False, "<think>why</think>Paris.", "why", "Paris."),
    (False, "Paris </think> x", "", "Paris </think> x"),
    (False, "<thinking>Paris", "", "<thinking>Paris"),
    (False, " \n", "", " \n"),
    (False, "<thin", "", "<thin"),
    (False, "\n" * 65 + "</think>", "", "\n" * 65 + "</think>"),
    (False, "\n" * 64 + "</think>", "", "\n" * 64),
)


@pytest.mark.parametrize(("thinking", "raw", "reasoning", "content"), CASES)
def test_every_cut_gives_the_same_split(thinking, raw, reasoning, content):
    expected = (reasoning, content)
    assert run(ReasoningParser(thinking=thinking), [raw]) == expected
    assert run(ReasoningParser(thinking=thinking), list(raw)) == expected
    for cut in range(len(raw) + 1):
        assert run(ReasoningParser(thinking=thinking), [raw[:cut], raw[cut:]]) == expected


fragments = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "</thinking>", "<", "</", "think>", "</thin", "a", "\n", "é"]
    ),
    max_size=10,
).map("".join)


@given(fragments, st.booleans(), st.lists(st.integers(0, 60), max_size=8))
def test_any_cutting_of_any_text_gives_the_same_split(raw, thinking, cuts):
    whole = run(ReasoningParser(thinking=thinking), [raw])
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(edges)]
    assert run(ReasoningParser(thinking=thinking), pieces) == whole


def test_text_comes_out_as_soon_as_it_is_certain():
    parser = ReasoningParser(thinking=True)
    assert parser.push("I think </th") == ("I think ", "")
    assert parser.push("ere") == ("</there", "")
    assert parser.is_inside
    assert parser.push("</think>P") == ("", "P")
    assert not parser.is_inside
    assert parser.is_closed
    assert parser.push("aris <") == ("", "aris <")


def test_a_copied_parser_goes_its_own_way():
    parser = ReasoningParser(thinking=True)
    parser.push("a</thi")
    draft = parser.copy()
    assert draft.push("nk>b") == ("", "b")
    assert parser.push("s") == ("</this", "")
    assert not parser.is_closed


@pytest.mark.parametrize(
    ("text", "thinking", "stopped", "expected"),
    [
        ("why</think>Paris.", True, True, ("why", "Paris.")),
        ("Paris.", True, True, (None, "Paris.")),
        ("still thin", True, False, ("still thin", "")),
        ("</think>Paris.", True, True, (None, "Paris.")),
        ("Paris.", False, True, (None, "Paris.")),
        ("<think>x", False, True, ("x", "")),
        ("", True, True, (None, "")),
    ],
)
def test_whole_replies_are_split_by_how_they_ended(text, thinking, stopped, expected):
    assert split_reasoning(text, thinking=thinking, stopped_by_itself=stopped) == expected


def stop_run(stops, pieces):
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.finish(), matcher.matched


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["END"], "abEND cd", "ab", "END"),
        (["END"], "abEN", "abEN", None),
        (["END"], "abENEND", "abEN", "END"),
        (["aab"], "aaab", "a", "aab"),
        (["world", "lo"], "hello world", "hel", "lo"),
        (["bc", "abc"], "xabcx", "x", "abc"),
        (["abcd", "bc"], "abcd", "a", "bc"),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
        (["。"], "好。", "好", "。"),
        (["x"], "x", "", "x"),
        ([], "anything", "anything", None),
    ],
)
def test_stops_at_every_cut(stops, text, shown, matched):
    for cut in range(len(text) + 1):
        assert stop_run(stops, [text[:cut], text[cut:]]) == (shown, matched)
    assert stop_run(stops, text) == (shown, matched)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.text("abc", max_size=20),
    st.lists(st.integers(0, 20), max_size=5),
)
def test_any_cutting_equals_a_letter_by_letter_search(stops, text, cuts):
    expected = (text, None)
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            expected = (text[: end - len(longest)], longest)
            break
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert stop_run(stops, pieces) == expected


def test_only_a_possible_beginning_is_held_back():
    matcher = StopMatcher(["###", "<end>"])
    assert matcher.push("a#") == "a"
    assert matcher.push("b<e") == "#b"
    draft = matcher.copy()
    assert draft.push("nd>") == ""
    assert (draft.matched, matcher.matched) == ("<end>", None)
    assert draft.push("more") == ""
    assert draft.finish() == ""
    assert matcher.finish() == "<e"


@pytest.mark.parametrize("stops", [["a", ""], ["a", None], ["a", 3]])
def test_empty_stops_are_refused(stops):
    with pytest.raises(RequestError) as caught:
        StopMatcher(stops)
    assert caught.value.param == "stop[1]"
