"""The model card is what its sources say, and says what it must."""

import copy
import json

import pytest

from tests.helpers.nano import NANO
from tests.training.skill_file import needs_skill_file
from training.card import beside, card, missed, shape, skill_table, sources
from training.packages import read_packages
from training.report import report
from training.skills import Skill, SkillResult, Verdict


def made_report():
    echo = SkillResult(
        Skill("echo", "echo", 0.98), tuple(Verdict(i % 10 < 4, i > 29, True) for i in range(400))
    )
    seek = SkillResult(
        Skill("retrieval_1000", "retrieval", 0.98, 1000), (Verdict(False, True, True),) * 10
    )
    about = {"through": "llm", "activations": "float32"}
    return json.loads(json.dumps(report([echo, seek], about)))


BESIDE = {
    "computed_on": "the training graph, float32, cpu",
    "text": {
        "prose": {
            "tokens": 4092, "nats": 2.5, "top1": 0.5125, "chains": [0.6, 0.3, 0.111],
            "indexer_random": {"nats": 3.5, "top1": 0.2},
            "indexer_dense": {"nats": 2.75, "top1": 0.4},
        }
    },
    "drafts_equal_1_2_3": {"count_json": {"n": 400, "places": 9000, "chains": [1.0, 0.99, 0.98]}},
    "retrieval_by_indexer": {
        "dense": [{"skill": "retrieval_1000", "n": 20, "passes": 3, "wilson_95": [0.05, 0.36]}]
    },
    "selection_recall": [0.9012, 0.8],
    "judges_agree": {"items": 1240, "same": 1239, "different": ["lists 3"]},
}  # fmt: skip


@needs_skill_file
def test_the_card_is_what_its_sources_say():
    assert (NANO / "README.md").read_text("utf-8") == card()


def test_every_source_of_text_stands_with_licence_version_file_and_hash():
    text = sources(read_packages())
    for package in read_packages():
        (line,) = [row for row in text.splitlines() if row.startswith(f"| {package.name} |")]
        for field in (package.version, package.licence, package.file, package.sha256):
            assert field in line
        assert ("held out" in line) == package.held_out


def test_skills_stand_with_rate_interval_bar_and_wordings():
    lines = skill_table(made_report()).splitlines()
    echo = "| echo | 370 of 400 (89.5 to 94.7 %) | 92.5 % | 98 % | 222 of 240 | 148 of 160 |"
    assert echo in lines
    assert any(line.startswith("| retrieval_1000 (1000 tokens) | 10 of 10") for line in lines)
    assert any(line.startswith("| stops by itself | 410 of 410") for line in lines)


def test_a_missed_bar_is_stated_with_its_figure():
    assert missed(made_report()) == "- echo: 0.925 < 0.98\n"
    assert missed({"below_bar": []}) == "None.\n"


def test_figures_beside_the_skills_are_those_of_the_file():
    text = beside(BESIDE)
    assert "| prose | 4092 | 2.5 | 51.2 % | 60.0 %, 30.0 %, 11.1 % | 3.5 | 2.75 |" in text
    assert "| count_json | 400 | 9000 | 100.0 %, 99.0 %, 98.0 % |" in text
    assert "| retrieval_1000 | dense | 3 of 20 (5.0 to 36.0 %) |" in text
    assert "0.9012, 0.8" in text
    assert "1240 items that both judges did, they agree on 1239" in text


def test_another_figure_gives_another_card():
    other = copy.deepcopy(BESIDE)
    other["text"]["prose"]["nats"] = 2.51
    assert beside(other) != beside(BESIDE)


@pytest.mark.parametrize("words", ["| hidden width | 128 |", "64 tokens in pools of 4"])
def test_the_shape_is_that_of_the_config(words):
    assert words in shape(NANO, json.loads((NANO / "config.json").read_text("utf-8")))
