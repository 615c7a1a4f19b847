"""The grammar of code lines: large, balanced, and without any held-out line, proved sentence by
sentence."""

import random

import pytest

from training.data import recall
from training.data.tables import alternatives, wordings
from training.data.turns import Dice

GRAMMARS = ("code_line", "code_update")
# What tells a held-out line from what training says of the same words: never in the grammar.
HELD_OUT_FRAMES = {
    "code_line": ("the code {v} belongs to {k}", "for {k} we use the code {v}"),
    "code_update": ("from now on {k} has the code {v}",),
}


def plain(sentence):
    """Without case, marks and runs of blanks."""
    kept = (letter if letter.isalnum() or letter in "{}" else " " for letter in sentence.lower())
    return " ".join("".join(kept).split())


@pytest.mark.parametrize("intent", GRAMMARS)
def test_no_sentence_of_the_grammar_holds_a_held_out_line(intent):
    ways = wordings()[intent]
    said = [plain(way) for way in set(ways.seen)]
    never = {plain(way) for way in ways.held_out} | set(HELD_OUT_FRAMES[intent])
    assert not [way for way in said if any(words in way for words in never)]


@pytest.mark.parametrize(("intent", "least"), [("code_line", 10_000), ("code_update", 4_000)])
def test_a_grammar_says_much_and_the_value_first_half_of_the_time(intent, least):
    seen = wordings()[intent].seen
    assert len({plain(way) for way in seen}) > least // 4
    assert len(set(seen)) > least
    value_first = sum(way.index("{v}") < way.index("{k}") for way in seen)
    assert 0.46 < value_first / len(seen) < 0.54
    assert all(way.count("{v}") == way.count("{k}") == 1 for way in seen)
    assert not [way for way in seen if set("(|)") & set(way) and "(see the list)" not in way
                and "(code)" not in way]  # fmt: skip


def test_alternatives_are_all_of_them_in_order():
    assert alternatives("(a|b) c (d|)") == ["a c d", "a c ", "b c d", "b c "]
    assert alternatives("{v} is") == ["{v} is"]


def test_lines_of_training_come_from_the_grammar_and_name_both():
    dice = Dice(random.Random(5))
    for _ in range(50):
        codes = recall.plain_codes(dice, 6)
        for (line,), (name, code) in zip(codes.lines, codes.table.items(), strict=True):
            assert name in line
            assert code in line
            pattern = line.replace(name, "{k}", 1).replace(code, "{v}", 1)
            assert pattern in SEEN_LINES


SEEN_LINES = set(wordings()["code_line"].seen)
