"""Evaluations in pieces: complete, the same in one process or two, and able to go on."""

import json
import shutil

import pytest

from tests.helpers.nano import NANO
from training.data.text import KINDS
from training.evaluate import evaluate, select
from training.evaluator import (
    DENSE,
    RANDOM,
    SKILL_OF,
    TRAINED,
    Job,
    Setup,
    beside_jobs,
    run_job,
    skill_jobs,
    verdict_json,
    verdict_of,
)
from training.jobs import Partial, about, run_jobs
from training.report import Found, agreement, beside, beside_misses
from training.skills import SKILLS, Skill, Verdict

SETUP = Setup(NANO, "llm", "cpu")
PASS, FAIL = Verdict(False, True, True, 4, (4, 3, 2)), Verdict(True, False, True)


def test_pieces_cover_every_item_once_and_have_names_of_their_own():
    jobs = skill_jobs(SKILLS)
    for skill in SKILLS:
        items = [i for j in jobs if j.what == skill.name for i in range(j.first, j.last)]
        assert items == list(range(skill.items))
    every = [*jobs, *beside_jobs(KINDS)]
    assert len({job.name for job in every}) == len(every)


def test_few_items_make_the_graph_do_as_few():
    assert {j.last for j in beside_jobs(KINDS, 3) if j.kind == "graph"} == {3}


def test_a_verdict_survives_json():
    for verdict in (PASS, FAIL):
        assert verdict_of(json.loads(json.dumps(verdict_json(verdict)))) == verdict
    with pytest.raises(TypeError, match="is no verdict"):
        verdict_of([0, 1, 1, 3, 7])


def test_two_processes_find_what_one_finds():
    skills = select(["facts", "vision_colour"], 5, ci=False)
    one = evaluate(SETUP, skills, 1)
    assert one == evaluate(SETUP, skills, 2)
    assert [result.tally.n for result in one] == [5, 5]
    assert [v.held_out for v in one[0].verdicts] == [True] * 4 + [False]


def test_what_is_done_is_not_done_again(tmp_path):
    path = tmp_path / "skills.partial"
    jobs = skill_jobs(
        [Skill("facts", "facts", None, items=3), Skill("chat", "chat", None, items=2)]
    )
    known = [verdict_json(FAIL)] * 3
    Partial(path, about(SETUP)).add(jobs[0].name, known)
    with path.open("a") as file:
        file.write('["skill/chat/trained/0/2", [[0, 1')  # killed while it wrote
    results = run_jobs(SETUP, jobs, 1, Partial(path, about(SETUP)))
    assert results[jobs[0].name] == known
    assert results[jobs[1].name] == run_job(SETUP, jobs[1])
    assert Partial(path, about(SETUP)).results == results


def test_results_of_another_checkpoint_are_not_taken(tmp_path):
    path = tmp_path / "skills.partial"
    Partial(path, {"files": "a"}).add("x", 1)
    assert Partial(path, {"files": "a"}).results == {"x": 1}
    assert Partial(path, {"files": "b"}).results == {}
    assert Partial(path, {"files": "a"}).results == {}


def test_a_checkpoint_that_changes_meanwhile_is_refused(tmp_path):
    folder = shutil.copytree(NANO, tmp_path / "nano")
    setup = Setup(folder, "llm", "cpu")
    jobs = skill_jobs([Skill("chat", "chat", None, items=2)])
    partial = Partial(tmp_path / "skills.partial", about(setup))
    config = folder / "config.json"
    config.write_text(config.read_text("utf-8") + "\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match="changed during the evaluation"):
        run_jobs(setup, jobs, 1, partial)
    assert partial.results == {}


def test_results_depend_on_weights_judge_and_data():
    found = about(SETUP)
    assert found["files"]["config.json"]
    assert about(Setup(NANO, "graph", "cpu")) != found
    assert about(SETUP) == found


def found_beside(top1=0.6, first=0.6, last=0.95):
    """Results of all jobs of the graph, made up; the LLM passes everything."""
    jobs = [*skill_jobs(SKILLS), *beside_jobs(KINDS)]
    results = {}
    for job in jobs:
        count = job.last - job.first
        good = Verdict(False, True, True, 100, (100, 99, round(100 * last)))
        results[job.name] = [verdict_json(good)] * count
        if job.kind == "text":
            shares = {"chains": [first, 0.3, 0.2], "tokens": 1023, "kept": [1.0], "loads": {}}
            results[job.name] = {"nats": 2.0, "top1": top1, **shares}
        if job.kind == "recall":
            results[job.name] = [0.9, 0.8]
    return Found(jobs, results)


def test_what_is_beside_the_skills_is_all_there():
    made = beside(found_beside(), KINDS, "a test")
    assert made["drafts_equal_1_2_3"]["lists"] == {
        "n": 400,
        "places": 40_000,
        "chains": [1.0, 0.99, 0.95],
    }
    assert set(made["text"]) == set(KINDS)
    assert made["text"]["code"]["indexer_dense"] == {"nats": 2.0, "top1": 0.6}
    assert [row["n"] for row in made["retrieval_by_indexer"][RANDOM]] == [20, 20]
    assert made["selection_recall"] == [0.9, 0.8]
    assert made["judges_agree"] == {"items": 1240, "same": 1240, "different": []}
    assert beside_misses(made) == []


@pytest.mark.parametrize(
    ("weak", "lines"),
    [
        ({"top1": 0.49}, ["held-out prose, top-1", "held-out code, top-1"]),
        ({"first": 0.49}, ["held-out prose, first draft"]),
        ({"last": 0.89}, [f"{n}, three drafts" for n in ("count_json", "count_aloud", "lists")]),
    ],
)
def test_bars_beside_the_skills_can_be_missed(weak, lines):
    missed = beside_misses(beside(found_beside(**weak), KINDS, "a test"))
    assert [line.startswith(start) for line, start in zip(missed, lines, strict=True)] == [
        True
    ] * len(lines)


def test_a_disagreement_of_the_judges_is_named():
    found = found_beside()
    name = Job("graph", "lists", TRAINED, 100, 200).name
    found.results[name] = [verdict_json(FAIL if i == 7 else PASS) for i in range(100)]
    assert agreement(found) == {"items": 1240, "same": 1239, "different": ["lists 107"]}
    assert SKILL_OF["lists"].items == 400
    assert found.verdicts("graph", "retrieval_1000", DENSE)[0].passed
