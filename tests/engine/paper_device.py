"""A device that keeps, instead of numbers, which prefix each page, slot and snapshot stands for.

It executes plans as `engine/plan.py` says and fails as soon as a sequence would compute from
anything but its own past, or write where somebody else reads. It counts holders by itself.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import count

from emberbox.engine.plan import Arrival, Limits, Plan, Result, Save
from emberbox.engine.scheduler import Scheduler

PAGE = 64
ROOMY = {
    "num_pages": 100,
    "num_slots": 4,
    "num_snapshots": 20,
    "prefill_tokens": 1000,
    "max_model_len": 4000,
}


class Asked:
    """A request as the test knows it. `chains[n]` stands for its first n keys."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival, self.id = arrival, arrival.request_id
        self.tokens, self.chains, self.num_computed = [], [0], 0
        self.slot, self.is_running = -1, False
        self.extend(arrival.token_ids, arrival.key_ids)

    def extend(self, token_ids, key_ids):
        self.tokens += token_ids
        for key in key_ids:
            self.chains.append(hash((self.chains[-1], key)))

    @property
    def num_prompt(self):
        return len(self.arrival.token_ids)

    @property
    def num_left(self):
        return self.num_prompt + self.arrival.max_tokens - len(self.tokens)

    @property
    def is_decoding(self):
        decodes = len(self.tokens) > self.num_prompt and self.num_computed == len(self.tokens) - 1
        return self.is_running and decodes

    def points(self, limits: Limits) -> set[int]:
        every, end = limits.snapshot_every, len(self.tokens)
        named = {self.num_prompt, self.num_prompt - self.arrival.num_suffix_tokens}
        points = named | set(range(every, end + 1, every))
        return {p for p in points if limits.num_snapshots and p >= limits.min_snapshot_tokens}


class Engine:
    """A scheduler, the paper device, and all requests that have not ended, oldest first."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.scheduler = limits, Scheduler(limits)
        self.asked: dict[int, Asked] = {}
        self.ids = count()
        self.pages = [{} for _ in range(limits.num_pages)]  # offset -> chain up to that token
        self.slots = {}  # slot -> (position, chain)
        self.snapshots = {}  # number -> (chains of the prefix, the partly filled page)

    def submit(self, token_ids, key_ids=None, *, max_tokens=8, suffix=0) -> int:
        arrival = Arrival(
            request_id=next(self.ids),
            token_ids=tuple(token_ids),
            key_ids=tuple(token_ids if key_ids is None else key_ids),
            max_tokens=max_tokens,
            num_suffix_tokens=suffix,
        )
        self.scheduler.submit(arrival)
        self.asked[arrival.request_id] = Asked(arrival)
        return arrival.request_id

    def abort(self, request_id: int) -> None:
        self.scheduler.abort(request_id)
        del self.asked[request_id]

    def schedule(self, propose=lambda request_id, most: ()) -> Plan:
        """Plan, and hold the plan against every rule that can be seen in it."""
        before = [asked for asked in self.asked.values() if asked.is_running]
        decoding = [asked.id for asked in before if asked.is_decoding]
        had_enough = self.num_spare() >= 0
        plan = self.scheduler.schedule(propose)
        assert bool(plan.work) == bool(self.asked) == self.scheduler.has_work
        self._follow(plan, before)
        assert not (plan.preempted and had_enough), "preempted without need"
        worked = {work.request_id: work for work in plan.work}
        for request_id in set(decoding) - set(plan.preempted):
            assert worked[request_id].samples
        if self.asked:
            assert next(iter(self.asked)) in worked, "the oldest request stands still"
        self._check_chunks(plan)
        self._check_queue(plan)
        self.check_holders()
        return plan

    def _follow(self, plan: Plan, before: list[Asked]) -> None:
        """Who runs now: preempted from the youngest on, admitted in order, no slot taken twice."""
        stopped = [asked.id for asked in reversed(before)][: len(plan.preempted)]
        assert list(plan.preempted) == stopped, "not the youngest"
        assert not before or before[0].id not in plan.preempted, "the oldest was preempted"
        assert not (plan.preempted and plan.admitted), "a plan preempts or admits"
        for request_id in plan.preempted:
            self.asked[request_id].num_computed = 0
            self.asked[request_id].is_running = False
        waiting = [asked.id for asked in self.asked.values() if not asked.is_running]
        admitted = [entry.request_id for entry in plan.admitted]
        assert admitted == waiting[: len(admitted)], "not in the order of arrival"
        for entry in plan.admitted:
            self.asked[entry.request_id].num_computed = entry.num_cached
            self.asked[entry.request_id].is_running = True
        running = self.scheduler._running
        assert [s.request_id for s in running] == [a.id for a in self.asked.values()][
            : len(running)
        ]
        for held in running:
            self.asked[held.request_id].slot = held.slot
        slots = [held.slot for held in running]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(self.limits.num_slots))
        assert [s.request_id for s in running] == [
            a.id for a in self.asked.values() if a.is_running
        ]

    def _check_chunks(self, plan: Plan) -> None:
        """The budget of prefill is kept, shared evenly and used; chunks end at snapshot points.

        The share of a sequence that then had to be preempted is lost for the step.
        """
        budget = self.limits.prefill_tokens
        prefilling = [a for a in self.asked.values() if a.is_running and not a.is_decoding]
        granted = {work.request_id: len(work.token_ids) for work in plan.work}
        wants = {}
        for asked in prefilling:
            ends = {p for p in asked.points(self.limits) if p > asked.num_computed}
            wants[asked.id] = min({*ends, len(asked.tokens)}) - asked.num_computed
            share = min(wants[asked.id], budget // (len(prefilling) + len(plan.preempted)))
            assert share <= granted.get(asked.id, 0) <= wants[asked.id]
        total = sum(granted.get(request_id, 0) for request_id in wants)
        assert total <= budget
        assert plan.preempted or total == min(budget, sum(wants.values()))

    def num_spare(self) -> int:
        """Pages no sequence uses, less those that running ones still need for known tokens."""
        used, missing = set(), 0
        for held in self.scheduler._running:
            used.update(held.pages)
            needed = -(-len(self.asked[held.request_id].tokens) // PAGE)
            missing += max(needed - len(held.pages), 0)
        return self.limits.num_pages - len(used) - missing

    def _check_queue(self, plan: Plan) -> None:
        """Who waits had to: no slot, no pages, or somebody was just preempted."""
        waiting = [asked for asked in self.asked.values() if not asked.is_running]
        num_running = len(self.asked) - len(waiting)
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (
            num_running,
            len(waiting),
        )
        if waiting and num_running < self.limits.num_slots and not plan.preempted:
            needed = -(-len(waiting[0].tokens) // PAGE)
            assert needed + num_running > self.num_spare(), "it could have been admitted"

    def forward(self, plan: Plan) -> None:
        """Restores, then everybody's certain tokens."""
        restored = {restore.slot for restore in plan.restores}
        for entry in plan.admitted:
            asked = self.asked.get(entry.request_id)
            if asked is not None and asked.slot not in restored:
                assert entry.num_cached == 0
                self.slots[asked.slot] = (0, 0)
        for restore in plan.restores:
            chains, partial = self.snapshots[restore.snapshot]
            position = len(chains) - 1
            self.slots[restore.slot] = (position, chains[-1])
            assert (restore.page is None) == (position % PAGE == 0)
            if restore.page is not None:
                self.pages[restore.page] = dict(partial)
        for entry in plan.admitted:
            asked = self.asked.get(entry.request_id)
            if asked is not None:
                assert self.slots[asked.slot] == (entry.num_cached, asked.chains[entry.num_cached])
                assert entry.num_cached < len(asked.tokens)
        for work in plan.work:
            if work.request_id in self.asked:
                self._compute(work)

    def _compute(self, work) -> None:
        asked = self.asked[work.request_id]
        num_certain = len(work.token_ids) - work.num_drafts
        stop = work.position + num_certain
        assert num_certain >= 1 and work.position == asked.num_computed
        assert list(work.token_ids[:num_certain]) == asked.tokens[work.position : stop]
        assert work.samples == (stop == len(asked.tokens))
        if work.num_drafts:
            assert asked.is_decoding and work.num_drafts <= min(7, asked.num_left - 1)
        assert work.slot == asked.slot
        assert self.slots[work.slot] == (work.position, asked.chains[work.position])
        assert len(work.pages) * PAGE >= work.position + len(work.token_ids), "pages do not cover"
        for at in range(work.position):
            assert self.pages[work.pages[at // PAGE]].get(at % PAGE) == asked.chains[at + 1]
        holders = self.holders()
        assert all(holders[page] == 1 for page in work.pages[work.position // PAGE :]), "shared"
        self._write(asked, work.pages, stop)

    def _write(self, asked: Asked, pages: tuple[int, ...], stop: int) -> None:
        for at in range(asked.num_computed, stop):
            self.pages[pages[at // PAGE]][at % PAGE] = asked.chains[at + 1]
        asked.num_computed = stop
        self.slots[asked.slot] = (stop, asked.chains[stop])

    def commit(self, plan: Plan, results: Mapping[int, Result]) -> tuple[Save, ...]:
        """Take the results, save what is to be saved, and forget who ended."""
        ending = {}
        for work in plan.work:
            asked, result = self.asked.get(work.request_id), results.get(work.request_id)
            if asked is None or result is None:
                continue
            asked.extend(result.tokens, result.tokens)
            self._write(asked, work.pages, asked.num_computed + len(result.tokens) - 1)
            if result.is_finished:
                ending[asked.slot] = self.asked.pop(work.request_id)
        by_slot = {asked.slot: asked for asked in self.asked.values() if asked.is_running} | ending
        for save in plan.saves:
            if save.slot in by_slot:
                self._save(save, by_slot[save.slot])
        ended = self.scheduler.commit(plan, results)
        for save in ended:
            self._save(save, ending[save.slot])
        self.check_holders()
        self.check_snapshots()
        return ended

    def _save(self, save: Save, asked: Asked) -> None:
        position, chain = self.slots[save.slot]
        assert chain == asked.chains[position] and position >= self.limits.min_snapshot_tokens
        assert (save.page is None) == (position % PAGE == 0)
        partial = {} if save.page is None else dict(self.pages[save.page])
        for at in range(position % PAGE):
            assert partial[at] == asked.chains[position - position % PAGE + at + 1]
        self.snapshots[save.snapshot] = (asked.chains[: position + 1], partial)

    def holders(self) -> Counter:
        held = Counter(page for s in self.scheduler._running for page in s.pages)
        held.update(p for s in self.scheduler.snapshots._by_digest.values() for p in s.pages)
        return held

    def check_holders(self) -> None:
        """Pages are conserved, and counted as often as they are held."""
        pool, holders = self.scheduler.pool, self.holders()
        counted = [a + b for a, b in zip(pool._num_users, pool._num_keepers, strict=True)]
        assert counted == [holders[page] for page in range(self.limits.num_pages)]
        assert sorted([*pool._free, *holders]) == list(range(self.limits.num_pages))
        used = {page for s in self.scheduler._running for page in s.pages}
        assert pool.num_available == self.limits.num_pages - len(used)
        counts = self.scheduler.counts()
        assert (counts.pages_used, counts.pages_total) == (len(holders), self.limits.num_pages)

    def check_snapshots(self) -> None:
        """What can be found is on the device: the state, and the pages it shares."""
        index = self.scheduler.snapshots
        assert len(index) + len(index._numbers) == self.limits.num_snapshots
        for snapshot in index._by_digest.values():
            chains, _ = self.snapshots[snapshot.number]
            assert len(chains) - 1 == snapshot.position
            assert len(snapshot.pages) == snapshot.position // PAGE
            for at in range(len(snapshot.pages) * PAGE):
                assert self.pages[snapshot.pages[at // PAGE]].get(at % PAGE) == chains[at + 1]

    def step(self, propose=lambda request_id, most: (), *, token=1, accept=0, finish=()) -> Plan:
        """One whole step: `accept` drafts of each are right; replies end when full or asked to."""
        plan = self.schedule(propose)
        self.forward(plan)
        if plan.work:
            self.commit(plan, self.results(plan, token=token, accept=accept, finish=finish))
        return plan

    def results(self, plan: Plan, *, token=1, accept=0, finish=()) -> dict[int, Result]:
        results = {}
        for work in plan.work:
            if work.samples and work.request_id in self.asked:
                num_right = min(accept, work.num_drafts)
                drafts = work.token_ids[len(work.token_ids) - work.num_drafts :]
                tokens = (*drafts[:num_right], token)
                is_full = len(tokens) == self.asked[work.request_id].num_left
                results[work.request_id] = Result(tokens, is_full or work.request_id in finish)
        return results

    def drain(self, **how) -> int:
        """Step until nobody is left. The oldest gains a token a step, so it takes no longer."""
        bound = sum(a.num_prompt + a.arrival.max_tokens for a in self.asked.values())
        num_steps = 0
        while self.asked and num_steps <= bound:
            self.step(**how)
            num_steps += 1
        assert not self.asked, f"not done after {bound} steps"
        kept = {p for s in self.scheduler.snapshots._by_digest.values() for p in s.pages}
        assert self.scheduler.pool.num_free == self.limits.num_pages - len(kept)
        assert len(self.scheduler._free_slots) == self.limits.num_slots
        return num_steps


def engine(**limits) -> Engine:
    """An engine with room for all, but for the limits given."""
    return Engine(Limits(**(ROOMY | limits)))


def tokens(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


def sizes(plan: Plan) -> dict[int, int]:
    """Request -> tokens of this step."""
    return {work.request_id: len(work.token_ids) for work in plan.work}


def positions(it: Engine) -> list[int]:
    """Of the snapshots that can be found."""
    return sorted(s.position for s in it.scheduler.snapshots._by_digest.values())
