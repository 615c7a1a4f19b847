"""What the nano is asked, how often, and what it must reach; counts and their intervals.

Knows no network: a judge says of each case whether it passed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE_Z = 1.959964  # 95 %
STOPS_BAR = 0.995
TOP1_BAR = 0.50  # of held-out prose and of code
FIRST_DRAFT_BAR = 0.50  # on held-out prose: the first draft is the trunk's choice
CHAIN_BAR = 0.90  # on JSON and counting answers: all three drafts are
HELD_OUT_POINTS = 0.10  # unseen wordings may lie this far below the bar's figure


@dataclass(frozen=True, slots=True)
class Skill:
    """`case` names the generator's item, `length` its variant (see CaseMaker.case).

    items: of a full evaluation. bar: the least pass rate, None for a figure that is only reported.
    """

    name: str
    case: str
    bar: float | None
    length: int = 0
    items: int = 400

    @property
    def in_ci(self) -> bool:
        """Short enough for a processor."""
        return self.length <= 2000 and self.bar is not None


def _plain(bar: float | None, *names: str) -> tuple[Skill, ...]:
    return tuple(Skill(name, name, bar) for name in names)


SKILLS: tuple[Skill, ...] = (
    *_plain(0.98, "count_json", "count_aloud", "facts", "explain", "code", "chat", "lists"),
    *_plain(0.98, "memory", "echo", "sums"),
    *_plain(None, "sums_direct"),
    *_plain(0.97, "tool_call", "tool_parallel", "tool_none", "tool_answer"),
    Skill("retrieval_1000", "retrieval", 0.98, 1000),
    Skill("retrieval_2000", "retrieval", None, 2000, 200),
    Skill("retrieval_4000", "retrieval", 0.97, 4000, 200),
    Skill("retrieval_8000", "retrieval", 0.95, 8000, 200),
    Skill("retrieval_hard_2000", "retrieval_hard", 0.90, 2000),
    *_plain(0.98, "vision_count", "vision_colour", "vision_shape", "vision_position"),
    *_plain(None, "vision_describe"),
    Skill("vision_code", "vision_code", 0.92),
    Skill("vision_code_wide", "vision_code", 0.92, 1),
    *_plain(0.95, "video_direction", "video_colours"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """passed: every token of the answer is the most likely one. stopped: the stop token is.

    chains[k]: of `starts` places in the answer, those where the first k + 1 drafts all equal the
    trunk's choices; empty when nothing was drafted.
    """

    held_out: bool
    passed: bool
    stopped: bool
    starts: int = 0
    chains: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tally:
    """Passes of n."""

    n: int
    passes: int

    @classmethod
    def of(cls, verdicts: Iterable[bool]) -> "Tally":
        every = list(verdicts)
        return cls(len(every), sum(every))

    @property
    def rate(self) -> float:
        return self.passes / self.n if self.n else 0.0

    def wilson(self) -> tuple[float, float]:
        """95 % interval of the pass rate (Wilson's score interval); (0, 1) for no items."""
        if not self.n:
            return 0.0, 1.0
        z2 = CONFIDENCE_Z**2
        centre = self.rate + z2 / (2 * self.n)
        spread = CONFIDENCE_Z * math.sqrt(
            self.rate * (1 - self.rate) / self.n + z2 / (4 * self.n**2)
        )
        low, high = ((centre + sign * spread) / (1 + z2 / self.n) for sign in (-1, 1))
        return max(0.0, low), min(1.0, high)

    def as_json(self) -> dict[str, object]:
        low, high = self.wilson()
        return {
            "n": self.n,
            "passes": self.passes,
            "rate": round(self.rate, 4),
            "wilson_95": [round(low, 4), round(high, 4)],
        }


@dataclass(frozen=True, slots=True)
class SkillResult:
    """One row of the skill table."""

    skill: Skill
    verdicts: tuple[Verdict, ...]

    @property
    def tally(self) -> Tally:
        return Tally.of(each.passed for each in self.verdicts)

    def by_wording(self, *, held_out: bool) -> Tally:
        return Tally.of(each.passed for each in self.verdicts if each.held_out == held_out)

    @property
    def failed(self) -> list[int]:
        """Numbers of the items that did not pass."""
        return [i for i, each in enumerate(self.verdicts) if not each.passed]

    @property
    def starts(self) -> int:
        """Places at which a chain of drafts began."""
        return sum(each.starts for each in self.verdicts)

    @property
    def chains(self) -> list[float]:
        """Share of places where the first 1, 2, 3 drafts all hold; empty without such places."""
        if not self.starts:
            return []
        drafted = [each.chains for each in self.verdicts if each.chains]
        return [round(sum(counts) / self.starts, 4) for counts in zip(*drafted, strict=True)]

    def misses(self) -> list[str]:
        """What lies below its bar, in words."""
        bar = self.skill.bar
        if bar is None:
            return []
        out = []
        if self.tally.rate < bar:
            out.append(f"{self.skill.name}: {self.tally.rate:.3f} < {bar}")
        unseen, seen = self.by_wording(held_out=True), self.by_wording(held_out=False)
        if unseen.n and seen.n and unseen.rate < seen.rate - HELD_OUT_POINTS:
            out.append(
                f"{self.skill.name}: unseen wordings {unseen.rate:.3f}, seen {seen.rate:.3f}"
            )
        return out

    def as_json(self) -> dict[str, object]:
        row: dict[str, object] = {"skill": self.skill.name, "text_tokens": 0, "bar": self.skill.bar}
        if self.skill.case.startswith("retrieval"):
            row["text_tokens"] = self.skill.length
        row |= self.tally.as_json()
        row["seen_wordings"] = self.by_wording(held_out=False).as_json()
        row["held_out_wordings"] = self.by_wording(held_out=True).as_json()
        if self.chains:
            row["drafts_equal_1_2_3"] = self.chains
        return row


def stops(results: Sequence[SkillResult]) -> Tally:
    """How often the stop token is the choice after a whole answer, over all skills."""
    return Tally.of(each.stopped for result in results for each in result.verdicts)
