"""skills.json: built from results, and what the tests demand of it later. Knows no network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.data.cases import HELD_OUT_OF_TEN
from training.data.seeds import Purpose
from training.evaluator import (
    DENSE,
    DRAFTED,
    LOOK_UPS,
    RANDOM,
    SKILL_OF,
    TRAINED,
    Job,
    verdict_of,
)
from training.jobs import Results
from training.skills import (
    CHAIN_BAR,
    FIRST_DRAFT_BAR,
    STOPS_BAR,
    TOP1_BAR,
    Skill,
    SkillResult,
    Tally,
    Verdict,
    stops,
)

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """Results of jobs, by what they say."""

    jobs: Sequence[Job]
    results: Results

    def verdicts(self, kind: str, skill: str, indexer: str = TRAINED) -> tuple[Verdict, ...]:
        """Of all items of a skill, in order."""
        mine = [j for j in self.jobs if (j.kind, j.what, j.indexer) == (kind, skill, indexer)]
        parts = [self.results[job.name] for job in sorted(mine, key=lambda job: job.first)]
        return tuple(verdict_of(v) for part in parts if isinstance(part, list) for v in part)

    def skill(self, skill: Skill, kind: str = "skill", indexer: str = TRAINED) -> SkillResult:
        return SkillResult(skill, self.verdicts(kind, skill.name, indexer))

    def one(self, kind: str, what: str, indexer: str = TRAINED) -> Any:  # noqa: ANN401
        """The result of a job that is not about items."""
        return self.results[Job(kind, what, indexer).name]


def report(
    results: Sequence[SkillResult], about: Mapping[str, object], beside: Row | None = None
) -> dict[str, object]:
    """skills.json."""
    ended = stops(results)
    below = [line for result in results for line in result.misses()]
    if ended.rate < STOPS_BAR:
        below.append(f"stops by itself: {ended.rate:.4f} < {STOPS_BAR}")
    done: dict[str, object] = {
        **about,
        "sampling": "greedy, judged by teacher forcing",
        "seeds": {
            "purpose": Purpose.EVALUATION.value,
            "items": "0 .. n - 1 of each skill",
            "held_out_wordings": f"items whose number ends in 0..{HELD_OUT_OF_TEN - 1}",
        },
        "skills": [
            {**result.as_json(), "judge": about["through"], "failed_items": result.failed}
            for result in results
        ],
        "stops": {"bar": STOPS_BAR, **ended.as_json()},
    }
    if beside is not None:
        done["beside"] = beside
        below += beside_misses(beside)
    return {**done, "below_bar": below}


def beside(found: Found, kinds: Sequence[str], computed_on: str) -> dict[str, object]:
    """Held-out text, drafts, the indexer's part and the experts' load: from the training graph."""
    text = {}
    for kind in kinds:
        text[kind] = dict(found.one("text", kind))
        for indexer in (RANDOM, DENSE):
            other = found.one("text", kind, indexer)
            text[kind][f"indexer_{indexer}"] = {k: other[k] for k in ("nats", "top1")}
    drafted = {name: found.skill(SKILL_OF[name], "graph") for name in DRAFTED}
    look_ups = {
        indexer: [found.skill(SKILL_OF[name], "graph", indexer).as_json() for name in LOOK_UPS]
        for indexer in (TRAINED, RANDOM, DENSE)
    }
    return {
        "computed_on": computed_on,
        "bars": {"top1": TOP1_BAR, "first_draft_prose": FIRST_DRAFT_BAR, "chain_of_3": CHAIN_BAR},
        "text": text,
        "drafts_equal_1_2_3": {
            name: {"n": result.tally.n, "places": result.starts, "chains": result.chains}
            for name, result in drafted.items()
        },
        "retrieval_by_indexer": look_ups,
        "selection_recall": found.one("recall", "prose"),
        "judges_agree": agreement(found),
    }


def agreement(found: Found) -> dict[str, object]:
    """Items that both the judge of the skills and the training graph did, and their differences."""
    both, other = 0, []
    for name in dict.fromkeys((*DRAFTED, *LOOK_UPS)):
        pairs = zip(found.verdicts("skill", name), found.verdicts("graph", name), strict=False)
        for i, (one, two) in enumerate(pairs):
            both += 1
            if one.passed != two.passed:
                other.append(f"{name} {i}")
    return {"items": both, "same": both - len(other), "different": other}


def beside_misses(beside: Row) -> list[str]:
    """Which of the bars beside the skills are not reached, in words."""
    out = [
        f"held-out {kind}, top-1: {figures['top1']} < {TOP1_BAR}"
        for kind, figures in beside["text"].items()
        if figures["top1"] < TOP1_BAR
    ]
    first = beside["text"]["prose"]["chains"][0]
    if first < FIRST_DRAFT_BAR:
        out.append(f"held-out prose, first draft: {first} < {FIRST_DRAFT_BAR}")
    for name, row in beside["drafts_equal_1_2_3"].items():
        if not row["chains"] or row["chains"][-1] < CHAIN_BAR:
            out.append(f"{name}, three drafts in a chain: {row['chains'][-1:]} < {CHAIN_BAR}")
    return out


def least_passes(row: Row, items: int) -> int:
    """How many of the first `items` items of a row of skills.json must still pass.

    The least number whose own Wilson interval reaches up to the lower end of the row's interval;
    but no more than those of these very items that the row says passed.
    """
    low: float = row["wilson_95"][0]
    failed: list[int] = row["failed_items"]
    least = next(k for k in range(items + 1) if Tally(items, k).wilson()[1] >= low)
    return min(least, items - sum(i < items for i in failed))
