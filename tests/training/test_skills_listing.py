"""The table of skills and its arithmetic, and a judge held against greedy decoding."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from emberbox.engine.llm import LLM
from training.data.cases import CaseMaker
from training.data.text import TOKENIZER, held_out
from training.evaluate import report, run_skills, select
from training.judges import LlmJudge
from training.skills import SKILLS, Skill, SkillResult, Tally, Verdict, stops

NANO = Path(TOKENIZER).parent
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


class EveryOther:
    """Passes cases by turns."""

    def judge(self, cases):
        return [Verdict(case.held_out, case.index % 2 == 0, True) for case in cases]


def test_the_report_holds_counts_intervals_and_seeds():
    tokens = Tokenizer.from_file(str(TOKENIZER))
    maker = CaseMaker(tokens, held_out(tokens))
    results = run_skills(EveryOther(), maker, select(["chat", "retrieval_1000"], 10, ci=False))
    done = json.loads(json.dumps(report(results, {"through": "test"})))
    assert [row["skill"] for row in done["skills"]] == ["chat", "retrieval_1000"]
    assert [row["text_tokens"] for row in done["skills"]] == [0, 1000]
    assert done["skills"][0]["n"] == 10
    assert done["skills"][0]["passes"] == 5
    assert done["skills"][0]["held_out_wordings"]["n"] == 4
    assert done["stops"]["passes"] == 20
    assert done["seeds"]["purpose"] == "evaluation"
    assert len(done["below_bar"]) == 2


@pytest.fixture(scope="module")
def judge():
    return LlmJudge(LLM(NANO, device="cpu"))


@pytest.mark.parametrize(
    "name", ["facts", "count_aloud", "echo", "vision_colour", "video_direction"]
)
def test_an_answer_passes_exactly_when_greedy_decoding_gives_it(name, judge):
    tokens = Tokenizer.from_file(str(TOKENIZER))
    maker = CaseMaker(tokens, held_out(tokens))
    cases = [case for i in range(30) if len(case := maker.case(name, i)) < 90][:5]
    for case, verdict in zip(cases, judge.judge(cases), strict=True):
        assert verdict.passed == (
            judge.greedy(case)[: len(case.answer)] == tuple(case.answer.tolist())
        )
