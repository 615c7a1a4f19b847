"""The table of skills and its arithmetic."""

import json

import pytest

from training.evaluate import select
from training.report import report
from training.skills import SKILLS, Skill, SkillResult, Tally, Verdict, stops

BARS = {
    "count_json": 0.98, "count_aloud": 0.98, "facts": 0.98, "explain": 0.98, "code": 0.98,
    "chat": 0.98, "lists": 0.98, "memory": 0.98, "echo": 0.98, "sums": 0.98, "tool_call": 0.97,
    "tool_parallel": 0.97, "tool_none": 0.97, "tool_answer": 0.97, "retrieval_1000": 0.98,
    "retrieval_4000": 0.97, "retrieval_8000": 0.95, "retrieval_hard_2000": 0.90,
    "vision_count": 0.98, "vision_colour": 0.98, "vision_shape": 0.98, "vision_position": 0.98,
    "vision_code": 0.92, "vision_code_wide": 0.92, "video_direction": 0.95, "video_colours": 0.95,
}  # fmt: skip


def result(skill, *verdicts):
    return SkillResult(skill, tuple(Verdict(*each) for each in verdicts))


def test_bars_and_numbers_of_items_stand():
    assert {skill.name: skill.bar for skill in SKILLS if skill.bar is not None} == BARS
    fewer = {"retrieval_2000", "retrieval_4000", "retrieval_8000"}
    assert {skill.name for skill in SKILLS if skill.items == 200} == fewer
    assert all(skill.items == 400 for skill in SKILLS if skill.name not in fewer)


def test_wilson_interval_by_hand():
    low, high = Tally(64, 64).wilson()
    assert (round(low, 4), high) == (0.9434, 1.0)
    low, high = Tally(10, 5).wilson()
    assert (round(low, 4), round(high, 4)) == (0.2366, 0.7634)
    assert Tally(0, 0).wilson() == (0.0, 1.0)


def test_misses_name_the_bar_and_the_wordings():
    skill = Skill("echo", "echo", 0.98)
    fine = result(skill, *[(False, True, True)] * 60, *[(True, True, True)] * 40)
    assert fine.misses() == []
    weak = result(skill, *[(False, True, True)] * 60, *[(True, i > 9, True) for i in range(40)])
    assert [line.partition(":")[0] for line in weak.misses()] == ["echo", "echo"]
    assert weak.by_wording(held_out=True) == Tally(40, 30)
    assert weak.by_wording(held_out=False) == Tally(60, 60)


def test_chains_and_stops_are_summed_over_items():
    skill = Skill("count_json", "count_json", None)
    both = result(skill, (False, True, True, 10, (10, 9, 8)), (True, False, False, 30, (20, 9, 2)))
    assert both.chains == [0.75, 0.45, 0.25]
    assert stops([both]) == Tally(2, 1)


def test_ci_asks_for_short_skills_with_a_bar():
    names = {skill.name for skill in select([], 10, ci=True)}
    assert names == {name for name in BARS if not name.endswith(("4000", "8000"))}
    assert {skill.items for skill in select(["retrieval"], 7, ci=False)} == {7}
    with pytest.raises(ValueError, match="no skill begins with 'dance'"):
        select(["dance"], None, ci=False)


def test_the_report_holds_counts_intervals_and_seeds():
    results = [
        SkillResult(skill, tuple(Verdict(i % 10 < 4, i % 2 == 0, True) for i in range(skill.items)))
        for skill in select(["chat", "retrieval_1000"], 10, ci=False)
    ]
    done = json.loads(json.dumps(report(results, {"through": "test"})))
    assert [row["skill"] for row in done["skills"]] == ["chat", "retrieval_1000"]
    assert [row["text_tokens"] for row in done["skills"]] == [0, 1000]
    assert [row["judge"] for row in done["skills"]] == ["test", "test"]
    assert done["skills"][0]["n"] == 10
    assert done["skills"][0]["passes"] == 5
    assert done["skills"][0]["failed_items"] == [1, 3, 5, 7, 9]
    assert done["skills"][0]["held_out_wordings"]["n"] == 4
    assert done["stops"]["passes"] == 20
    assert done["seeds"]["purpose"] == "evaluation"
    assert len(done["below_bar"]) == 2


def test_stopping_seldom_is_below_its_bar():
    weak = result(Skill("chat", "chat", 0.5), *[(False, True, i > 1) for i in range(100)])
    assert report([weak], {"through": "test"})["below_bar"] == ["stops by itself: 0.9800 < 0.995"]
