"""The skill table of a checkpoint or a run:

    python -m training.evaluate models/ember-nano --through llm --processes 2 \\
        --json models/ember-nano/skills.json

`llm` judges the skills through emberbox.LLM, `graph` on the training graph, many cases at once;
both by teacher forcing. Drafts, held-out text, the indexer and the experts are measured on the
training graph either way. Greedy throughout; items are those of the purpose `evaluation`, which
training never uses. With --json, what is done is kept beside that file: the same command goes on.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from training.data.text import KINDS
from training.evaluator import Setup, beside_jobs, skill_jobs, weight_hashes
from training.jobs import Partial, about, run_jobs
from training.report import Found, beside, report
from training.skills import SKILLS, Skill, SkillResult

log = logging.getLogger("training.evaluate")


def select(names: Sequence[str], items: int | None, *, ci: bool) -> list[Skill]:
    """Skills whose name begins with one of `names` (all if there is none), `items` of each.

    Raises ValueError for a name that begins none.
    """
    for name in names:
        if not any(skill.name.startswith(name) for skill in SKILLS):
            raise ValueError(f"no skill begins with {name!r}")
    chosen = [s for s in SKILLS if not names or s.name.startswith(tuple(names))]
    chosen = [skill for skill in chosen if skill.in_ci or not ci]
    return [replace(s, items=min(items, s.items) if items else s.items) for s in chosen]


def evaluate(
    setup: Setup, skills: Sequence[Skill], processes: int, partial: Partial | None = None
) -> list[SkillResult]:
    """One result per skill; item numbers 0 .. items - 1."""
    jobs = skill_jobs(skills)
    found = Found(jobs, run_jobs(setup, jobs, processes, partial))
    return [found.skill(skill) for skill in skills]


def everything(
    setup: Setup,
    skills: Sequence[Skill],
    items: int | None,
    processes: int,
    partial: Partial | None,
) -> dict[str, object]:
    """The whole of skills.json."""
    head = heading(setup)  # before anything runs: changes from here on are refused
    jobs = [*skill_jobs(skills), *beside_jobs(KINDS, items)]
    found = Found(jobs, run_jobs(setup, jobs, processes, partial))
    graph = f"the training graph, {setup.activations}, {setup.device}"
    return report([found.skill(skill) for skill in skills], head, beside(found, KINDS, graph))


def heading(setup: Setup) -> dict[str, object]:
    """What was judged, by what."""
    return {
        "checkpoint": weight_hashes(setup.folder),
        "through": setup.through,
        "device": setup.device,
        "activations": setup.activations,
        "threads_per_process": 1 if setup.device == "cpu" else None,
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate")
    parser.add_argument("folder", type=Path, help="checkpoint folder, or for the graph a run")
    parser.add_argument("--through", choices=["graph", "llm"], default="graph")
    parser.add_argument("--items", type=int, help="of each skill, at most what the table says")
    parser.add_argument("--skills", default="", help="beginnings of names, separated by commas")
    parser.add_argument("--ci", action="store_true", help="only what a processor does in time")
    parser.add_argument("--only-skills", action="store_true", help="leave out text and indexer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--float32", action="store_true", help="activations, on a GPU")
    parser.add_argument("--processes", type=int, default=1, help="one thread each")
    parser.add_argument("--json", type=Path, help="write the report here")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    skills = select([s for s in options.skills.split(",") if s], options.items, ci=options.ci)
    setup = Setup(options.folder, options.through, options.device, options.float32)
    partial = None
    if options.json is not None:
        partial = Partial(options.json.with_suffix(".partial"), about(setup))
    if options.only_skills:
        head = heading(setup)
        done = report(evaluate(setup, skills, options.processes, partial), head)
    else:
        done = everything(setup, skills, options.items, options.processes, partial)
    if options.json is not None and partial is not None:
        options.json.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        partial.path.unlink()
    _say(done)
    return 0


def _say(done: dict[str, object]) -> None:
    """The table on the terminal."""
    rows = done["skills"]
    for row in rows if isinstance(rows, list) else ():
        unseen = row["held_out_wordings"]
        counts = (row["passes"], row["n"], unseen["passes"], unseen["n"])
        log.info("%-20s %4d of %4d, unseen wordings %3d of %3d", row["skill"], *counts)
    below = done["below_bar"]
    for line in below if isinstance(below, list) else ():
        log.info("below its bar: %s", line)


if __name__ == "__main__":
    sys.exit(main())
