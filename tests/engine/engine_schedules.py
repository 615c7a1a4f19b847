"""Schedules of trouble for the real engine, each reply held against the same request run alone.

A seed makes one schedule: limits that are far too small, requests that share prefixes, cuts, edits,
pictures and second turns, aborts, and drafts that are right by a coin. Every reply must be the
tokens and the text that a fresh engine gives the request alone, without snapshots or drafts.

    python -m tests.engine.engine_schedules --schedules 5000
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import torch

from emberbox.engine.core import Engine
from emberbox.engine.llm import LLM
from emberbox.engine.plan import Limits
from emberbox.engine.request import EngineStats, FinishReason
from emberbox.model.config import PAGE_TOKENS
from emberbox.testing.coin_drafter import CoinDrafter, oracle_of
from tests.engine.cold_runs import Cold, ColdRuns
from tests.engine.engine_world import MAX_PROMPT, MOST_TOKENS, Ask
from tests.engine.small_engine import poison_free
from tests.helpers.nano import nano_llm

SCHEDULES_PER_WORLD = 50  # they ask the same prompts, so that the runs alone are needed once
ABORT_RATE = 0.03
SUBMIT_RATE = 0.2
NEXT_TURN_RATE = 0.25


class Difference(AssertionError):
    """An engine broke a promise. The message says how, and how to see it again."""


@dataclass(slots=True)
class Sent:
    """A request under way, and what its events gave so far."""

    ask: Ask
    cold: Cold
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    num_cached: int = 0
    was_preempted: bool = False


class Schedule:
    """One engine with everything that a seed does to it."""

    def __init__(self, seed: int, colds: ColdRuns) -> None:
        self.seed, self.colds, self.rng = seed, colds, Random(seed)
        # For preemptions, with prompts of a page and replies beyond it; or for snapshots that stay.
        self.is_tight = self.rng.random() < 0.5
        self.world = colds.world(seed // SCHEDULES_PER_WORLD)
        self.counters: Counter[str] = Counter()
        self.live: dict[int, Sent] = {}
        self.ended: list[Sent] = []
        self.replies: dict[int, tuple[int, ...]] = {}  # what the drafter knows
        self.asks = self._asks()
        self.engine = self._engine()
        self._count_evictions()

    def run(self) -> Counter[str]:
        """All of it; raises Difference."""
        try:
            self._run()
        except Exception as error:
            raise Difference(
                f"schedule {self.seed}: {type(error).__name__}: {error}\nrepeat with: python -m "
                f"tests.engine.engine_schedules --first {self.seed} --schedules 1"
            ) from error
        return self.counters

    def _asks(self) -> list[Ask | None]:
        """What is asked, in order; None stands for a next turn of something that ended."""
        rng, families = self.rng, self.rng.sample(self.world.families, 2)
        choices = rng.sample(families[0], 4)
        if self.is_tight:
            choices = [a for f in families for a in f if len(a.prompt.token_ids) <= PAGE_TOKENS]
        asks: list[Ask | None] = [self._cut(rng.choice(choices)) for _ in range(rng.randint(4, 7))]
        for at in range(1, len(asks)):
            if rng.random() < NEXT_TURN_RATE:
                asks[at] = None
        return asks

    def _cut(self, ask: Ask) -> Ask:
        """The same with a budget of its own."""
        num_tokens = self.rng.choice([8, 15, MOST_TOKENS] if self.is_tight else [1, 3, 6, 12])
        return replace(ask, params=replace(ask.params, max_tokens=num_tokens))

    def _engine(self) -> Engine:
        rng = self.rng
        is_tight = self.is_tight
        limits = Limits(
            num_pages=rng.choice([3, 4] if is_tight else [5, 6, 8]),
            num_slots=rng.choice([3, 4, 5] if is_tight else [1, 2, 3]),
            num_snapshots=rng.choice([0, 2, 4] if is_tight else [3, 8, 12]),
            prefill_tokens=rng.choice([17, 40, 64, 100, 250]),
            max_model_len=MAX_PROMPT + MOST_TOKENS,
            snapshot_every=rng.choice([25, 40, 64, 64]),
            min_snapshot_tokens=rng.choice([1, 20, 64]),
        )
        right = rng.choice([None, None, 0.0, 0.6, 0.6, 1.0])
        drafter = None
        if right is not None:
            drafter = CoinDrafter(right, self.seed, oracle_of(self.replies))
        return self.colds.engine(limits, drafter)

    def _count_evictions(self) -> None:
        index, counters = self.engine.scheduler.snapshots, self.counters
        drop = index.drop

        def counted(snapshot):
            counters["evictions"] += 1
            drop(snapshot)

        index.drop = counted

    def _run(self) -> None:
        rng, ids = self.rng, iter(range(1000))
        bound = 4 * sum(MAX_PROMPT + MOST_TOKENS for _ in self.asks)
        while self.asks or self.engine.has_work:
            if self.asks and (not self.live or rng.random() < SUBMIT_RATE):
                for _ in range(rng.choice([1, 1, 3])):
                    self._submit(next(ids))
            elif self.live and rng.random() < ABORT_RATE:
                self._abort(rng.choice(list(self.live)))
            else:
                self._step()
            assert self.engine.stats().steps < bound, "the engine does not come to an end"
        self._check_end()

    def _submit(self, request_id: int) -> None:
        if not self.asks:
            return
        ask = self.asks.pop(0) or self._next_turn()
        cold = self.colds.of(ask)
        self.replies[request_id] = cold.tokens
        self.live[request_id] = Sent(ask, cold)
        self.engine.submit(request_id, ask.prompt, ask.params)
        self.counters["submitted"] += 1

    def _next_turn(self) -> Ask:
        """What follows on something that ended, or the same again where that would be too long."""
        earlier = [sent for sent in self.ended if sent.finish is not None]
        if not earlier:
            return self._cut(self.rng.choice(self.world.families[0]))
        sent = self.rng.choice(earlier)
        turn = self.world.next_turn(sent.ask, sent.tokens)
        if turn is None:
            return sent.ask
        self.counters["next turns"] += 1
        return self._cut(turn)

    def _abort(self, request_id: int) -> None:
        before = self.engine.stats()
        self.engine.abort(request_id)
        after = self.engine.stats()
        sent = self.live.pop(request_id)
        is_running = before.num_running - after.num_running
        assert is_running + before.num_waiting - after.num_waiting == 1
        self.counters["aborted while running" if is_running else "aborted while waiting"] += 1
        self.counters["aborted after preemption"] += sent.was_preempted
        assert tuple(sent.tokens) == sent.cold.tokens[: len(sent.tokens)] or self._is_tie(sent)
        self.ended.append(sent)

    def _step(self) -> None:
        poison_free(self.engine)
        before = self.engine.stats()
        waiting_before = self._waiting()
        events = self.engine.step()
        assert self.engine.stats().steps == before.steps + 1, "a step without work"
        for request_id in self._waiting() - waiting_before:
            self.live[request_id].was_preempted = True
            self.counters["preemptions with pictures"] += bool(self.live[request_id].ask.images)
        for event in events:
            assert event.error is None, f"request {event.request_id}: {event.error!r}"
            sent = self.live[event.request_id]
            assert event.event.token_id is not None and sent.finish is None
            assert event.num_cached in range(len(sent.ask.prompt.token_ids))
            assert event.num_cached == sent.num_cached or not sent.tokens
            sent.num_cached = event.num_cached
            sent.tokens.append(event.event.token_id)
            sent.text += event.event.text
            sent.finish = event.event.finish
            if sent.finish is not None:
                self.ended.append(self.live.pop(event.request_id))
                self._check_reply(sent)

    def _waiting(self) -> set[int]:
        return {sequence.request_id for sequence in self.engine.scheduler._waiting}

    def _check_reply(self, sent: Sent) -> None:
        counters, ask = self.counters, sent.ask
        counters["finished"] += 1
        counters["sampled"] += ask.params.temperature > 0
        counters[f"ended by {sent.finish}"] += 1
        counters["pictures"] += bool(ask.images)
        counters["pictures reused"] += sent.num_cached > ask.end_of_images > 0
        counters["cached in part of a page"] += sent.num_cached % PAGE_TOKENS > 0
        if tuple(sent.tokens) != sent.cold.tokens and self._is_tie(sent):
            return
        assert tuple(sent.tokens) == sent.cold.tokens, f"{sent.tokens} is not {sent.cold.tokens}"
        assert sent.text == sent.cold.text, f"{sent.text!r} is not {sent.cold.text!r}"
        assert sent.finish is sent.cold.finish

    def _is_tie(self, sent: Sent) -> bool:
        """Whether two tokens were as good as each other where the reply first differs."""
        pairs = zip(sent.tokens, sent.cold.tokens, strict=False)
        at = next((i for i, (got, cold) in enumerate(pairs) if got != cold), None)
        if at is None or not self.colds.is_near_tie(sent.ask, sent.cold, at, sent.tokens[at]):
            return False
        self.counters["near-ties"] += 1
        return True

    def _check_end(self) -> None:
        engine, stats = self.engine, self.engine.stats()
        num_slots = engine.scheduler.limits.num_slots
        assert not self.live and len(self.ended) == self.counters["submitted"]
        assert (stats.num_running, stats.num_waiting, engine._replies) == (0, 0, {})
        self._note(stats)
        index = engine.scheduler.snapshots
        index.clear()
        assert sorted(index._numbers) == list(range(index.num_snapshots)), "snapshots leaked"
        assert engine.scheduler.pool.num_free == engine.scheduler.limits.num_pages, "pages leaked"
        assert sorted(engine.scheduler._free_slots) == list(range(num_slots))
        waiting = [s for s in range(num_slots) if engine.runner.cache.is_waiting(s)]
        assert not waiting, f"slots {waiting} wait for a commit"

    def _note(self, stats: EngineStats) -> None:
        done = sum(len(sent.tokens) for sent in self.ended)
        assert stats.generated_tokens == done, f"{stats.generated_tokens} tokens, {done} came"
        self.counters.update(
            {
                "schedules": 1,
                "tokens": done,
                "steps": stats.steps,
                "preemptions": stats.num_preemptions,
                "hits": self.engine.scheduler.counts().num_hits,
                "cached tokens": stats.cached_tokens,
                "accepted drafts": stats.accepted_tokens,
                "rejected drafts": stats.drafted_tokens - stats.accepted_tokens,
            }
        )


def run_schedules(
    first: int, num: int, *, llm: LLM | None = None, progress: bool = False
) -> Counter[str]:
    """Counters of all of them together. Raises Difference at the first one that differs."""
    colds, total, start = ColdRuns(llm or nano_llm()), Counter(), time.monotonic()
    for seed in range(first, first + num):
        total.update(Schedule(seed, colds).run())
        if progress and (seed - first + 1) % 20 == 0:
            seconds = time.monotonic() - start
            print(f"{seed - first + 1} of {num} schedules, {seconds:.0f} s", flush=True)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        total = run_schedules(args.first, args.schedules, progress=True)
    except Difference as difference:
        print(difference, file=sys.stderr)
        return 1
    print("\n".join(f"{total[name]:8} {name}" for name in sorted(total)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
