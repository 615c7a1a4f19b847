"""Decide what the next step computes: whose tokens, on which slot and pages, what is copied.

A sequence is its known tokens and how many of them are computed. A step computes from there on;
where it reaches the last known token it samples, which makes a new token known. The rules:

- Requests are admitted in the order of their arrival, when a slot is free and the pages for all
  their known tokens can be had, those counted that running sequences still need for theirs.
- Every running sequence that decodes is in every step, with drafts if it has any.
- Prefilling sequences share `prefill_tokens` of a step evenly and what they leave goes to the
  oldest: decode never waits for a whole prefill, and no prefill waits for another.
- A chunk of prefill ends at each snapshot point: before the generation suffix, at the prompt's end,
  and every `snapshot_every` tokens. The end of a reply is one too. Of the periodic ones of one
  prefill only the newest 8 stay, and those whose number is a power of two.
- Pages are taken as tokens need them. When none is free, least recently used snapshots are dropped;
  when no snapshot can help, drafts are; when no draft can help, the youngest running sequence is
  preempted: it goes back to the front of the queue and is computed again from its best snapshot.
  For that it waits until there is a page to spare for each running sequence as well, or it would
  soon be preempted again. The oldest is never preempted, so one always ends. A plan that preempts
  admits nobody.

So the running sequences are always the oldest ones there are. Knows no tensors and no text.
"""

from collections import abc, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from emberbox.engine.pages import PagePool
from emberbox.engine.plan import (
    MAX_DRAFTS,
    Admitted,
    Arrival,
    Limits,
    Plan,
    Restore,
    Result,
    Save,
    Work,
)
from emberbox.engine.sequence import PlannedSave, Sequence, num_pages_of
from emberbox.engine.snapshots import Snapshot, SnapshotIndex
from emberbox.errors import ContextLengthError
from emberbox.model.config import PAGE_TOKENS

NUM_RECENT = 8  # periodic snapshots of one prefill that stay whatever their number

Propose = Callable[[int, int], abc.Sequence[int]]


@dataclass(frozen=True, slots=True)
class Counts:
    """The state of a scheduler, and what it counted since its start.

    A page that only snapshots keep is used too. `num_hits` admissions began from a snapshot, which
    saved computing `num_hit_tokens`.
    """

    pages_used: int
    pages_total: int
    snapshots_used: int
    snapshots_total: int
    num_preemptions: int
    num_hits: int
    num_hit_tokens: int


class Scheduler:
    """One step is `schedule`, then `commit` of the plan unless it has no work."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = PagePool(limits.num_pages)
        self.snapshots = SnapshotIndex(limits.num_snapshots, self.pool)
        self._sequences: dict[int, Sequence] = {}
        self._running: list[Sequence] = []  # oldest first, and older than all that wait
        self._waiting: deque[Sequence] = deque()  # oldest first
        self._free_slots = list(reversed(range(limits.num_slots)))
        self._step = _Step()
        self._plan: Plan | None = None  # waits for its commit
        self._num_preemptions = self._num_hits = self._num_hit_tokens = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that were not admitted yet, or were preempted."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether the next plan will have work."""
        return bool(self._sequences)

    @property
    def is_planned(self) -> bool:
        """Whether a plan waits for its commit."""
        return self._plan is not None

    def counts(self) -> Counts:
        """What there is and what happened, for the statistics."""
        return Counts(
            pages_used=self.pool.num_pages - self.pool.num_free,
            pages_total=self.pool.num_pages,
            snapshots_used=len(self.snapshots),
            snapshots_total=self.limits.num_snapshots,
            num_preemptions=self._num_preemptions,
            num_hits=self._num_hits,
            num_hit_tokens=self._num_hit_tokens,
        )

    def submit(self, arrival: Arrival) -> None:
        """Put a request at the end of the queue.

        Raises ContextLengthError when prompt and reply could never be held, ValueError when the id
        is that of a request which has not ended.
        """
        if arrival.request_id in self._sequences:
            raise ValueError(f"request {arrival.request_id} is already here")
        num_prompt, num_pool = len(arrival.token_ids), self.limits.num_pages * PAGE_TOKENS
        room, wanted = min(self.limits.max_model_len, num_pool), num_prompt + arrival.max_tokens
        if wanted > room:
            raise ContextLengthError(
                f"the context holds {room} tokens; the prompt has {num_prompt} and the reply may "
                f"have {arrival.max_tokens}, {wanted} in all",
                param="messages",
                hint=f"shorten the prompt or ask for at most {max(room - num_prompt, 0)} tokens",
            )
        sequence = Sequence(arrival)
        self._sequences[arrival.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: int) -> None:
        """End a request in any state; what it holds is free at once. KeyError for an unknown id.

        Between `schedule` and `commit` its work and its saves become void: `commit` wants no result
        for it, and nothing that was computed for it can be found later.
        """
        sequence = self._sequences.pop(request_id)
        for planned in [p for p in self._step.saves if p.sequence is sequence]:
            self._step.saves.remove(planned)
            self.snapshots.cancel(planned.number)
        if sequence.is_running:
            self._running.remove(sequence)
            self._free(sequence)
        else:
            self._waiting.remove(sequence)

    def schedule(self, propose: Propose) -> Plan:
        """Plan the next step. `propose(request_id, most)` gives at most `most` draft tokens."""
        assert self._plan is None, "the last plan was not committed"
        self._step = step = _Step()
        for sequence in tuple(self._running):
            if sequence.is_running and sequence.is_decoding:
                self._cover(sequence, len(sequence.tokens))
        if not step.preempted:
            self._admit()
        chunks = self._prefill()
        work = tuple(
            self._decode_work(sequence, propose)
            if sequence.is_decoding
            else self._prefill_work(sequence, chunks[sequence.request_id])
            for sequence in self._running
            if sequence.is_decoding or chunks[sequence.request_id]
        )
        plan = Plan(
            work=work,
            restores=tuple(step.restores),
            saves=tuple(planned.save() for planned in step.saves),
            admitted=tuple(step.admitted),
            preempted=tuple(step.preempted),
        )
        self._plan = plan if work else None
        return plan

    def commit(self, plan: Plan, results: Mapping[int, Result]) -> tuple[Save, ...]:
        """Take note that a plan was computed, and of what was sampled for each Work that samples.

        Returns the saves of replies that ended; they are done after the plan's own, in this order
        and before the next plan.
        """
        assert plan is self._plan, "not the plan that was scheduled last"
        self._plan = None
        self._add_planned()
        ended: list[Save] = []
        for work in plan.work:
            sequence = self._sequences.get(work.request_id)
            if sequence is None or not sequence.is_running:
                continue  # aborted since, and perhaps asked anew under the same id
            sequence.num_computed += len(work.token_ids) - work.num_drafts
            if not work.samples:
                continue
            self._accept(sequence, work, results[work.request_id])
            if results[work.request_id].is_finished:
                self._plan_save(sequence, sequence.num_computed)
                ended.extend(self._add_planned())
                del self._sequences[work.request_id]
                self._running.remove(sequence)
                self._free(sequence)
        return tuple(ended)

    def _accept(self, sequence: Sequence, work: Work, result: Result) -> None:
        accepted = result.tokens[:-1]
        drafts = work.token_ids[len(work.token_ids) - work.num_drafts :]
        assert result.tokens, "a result has at least one token"
        assert accepted == drafts[: len(accepted)], "accepted tokens are the first drafts"
        sequence.extend(result.tokens)
        sequence.num_computed += len(accepted)
        num_left = sequence.num_most - len(sequence.tokens)
        assert num_left >= (0 if result.is_finished else 1), "the reply exceeds max_tokens"
        num_needed = num_pages_of(len(sequence.tokens))
        self.pool.release(sequence.pages[num_needed:])  # it was for drafts that were refused
        sequence.pages = sequence.pages[:num_needed]

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.stop()

    def _cover(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give it the pages for its first `num_tokens`. False when it was preempted itself."""
        num_missing = num_pages_of(num_tokens) - len(sequence.pages)
        if num_missing <= 0:
            return True
        while not self.snapshots.make_room(num_missing):
            victim = self._running[-1]
            assert victim is not self._running[0], "the oldest sequence fits alone"
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.pages += self.pool.take(num_missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._free(sequence)
        sequence.was_preempted = True
        self._waiting.appendleft(sequence)
        self._step.preempted.append(sequence.request_id)
        self._num_preemptions += 1

    def _num_spare(self) -> int:
        """Pages that can be had beyond what running sequences need for their known tokens."""
        needed = (num_pages_of(len(s.tokens)) - len(s.pages) for s in self._running)
        return self.pool.num_available - sum(max(n, 0) for n in needed)

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            hit = self._best(sequence)
            shared = hit.pages if hit else ()
            num_missing = num_pages_of(len(sequence.tokens))
            num_missing += len(self._running) if sequence.was_preempted else 0
            num_missing -= sum(map(self.pool.is_used, shared))
            if num_missing > self._num_spare():
                return
            self._waiting.popleft()
            self._start(sequence, hit)

    def _best(self, sequence: Sequence) -> Snapshot | None:
        """The longest snapshot of a waiting sequence; looked for only when there are others."""
        if sequence.found_version != self.snapshots.version:
            sequence.found = self.snapshots.find(sequence.keys, len(sequence.tokens))
            sequence.found_version = self.snapshots.version
        return sequence.found

    def _start(self, sequence: Sequence, hit: Snapshot | None) -> None:
        self._running.append(sequence)
        sequence.slot, sequence.is_running = self._free_slots.pop(), True
        if hit is not None:
            self.snapshots.touch(hit.digest)
            self.pool.share(hit.pages)
            sequence.pages, sequence.num_computed = hit.pages, hit.position
            self._num_hits += 1
            self._num_hit_tokens += hit.position
        is_covered = self._cover(sequence, sequence.num_computed + 1)
        assert is_covered, "admitted without a page to go on"
        if hit is not None:
            page = sequence.partial_page(hit.position)
            self._step.restores.append(Restore(hit.number, sequence.slot, page))
        self._step.admitted.append(Admitted(sequence.request_id, sequence.num_computed))

    def _prefill(self) -> dict[int, int]:
        """Tokens of this step for each prefilling sequence, and the pages for them."""
        prefilling = [s for s in self._running if not s.is_decoding]
        wants = [s.next_stop(self.limits) - s.num_computed for s in prefilling]
        chunks = {}
        for sequence, num_tokens in zip(
            prefilling, _shares(wants, self.limits.prefill_tokens), strict=True
        ):
            if sequence.is_running and self._cover(sequence, sequence.num_computed + num_tokens):
                chunks[sequence.request_id] = num_tokens
        return chunks

    def _prefill_work(self, sequence: Sequence, num_tokens: int) -> Work:
        start, stop = sequence.num_computed, sequence.num_computed + num_tokens
        is_periodic = stop % self.limits.snapshot_every == 0
        if is_periodic or stop in sequence.named_points:
            self._plan_save(sequence, stop, is_periodic=is_periodic)
        return Work(
            request_id=sequence.request_id,
            token_ids=tuple(sequence.tokens[start:stop]),
            position=start,
            slot=sequence.slot,
            pages=sequence.pages,
            samples=stop == len(sequence.tokens),
        )

    def _decode_work(self, sequence: Sequence, propose: Propose) -> Work:
        drafts = self._drafts(sequence, propose)
        return Work(
            request_id=sequence.request_id,
            token_ids=(sequence.tokens[-1], *drafts),
            position=sequence.num_computed,
            slot=sequence.slot,
            pages=sequence.pages,
            num_drafts=len(drafts),
            samples=True,
        )

    def _drafts(self, sequence: Sequence, propose: Propose) -> tuple[int, ...]:
        most = min(MAX_DRAFTS, sequence.num_most - len(sequence.tokens) - 1)
        room = len(sequence.pages) * PAGE_TOKENS - len(sequence.tokens)
        if most > room and self._num_spare() < 1:
            most = room
        if most < 1:
            return ()
        drafts = tuple(propose(sequence.request_id, most))
        assert len(drafts) <= most, f"{len(drafts)} drafts, at most {most} were asked for"
        self._cover(sequence, len(sequence.tokens) + len(drafts))
        return drafts

    def _plan_save(self, sequence: Sequence, position: int, *, is_periodic: bool = False) -> None:
        """Reserve a number for this prefix, unless it is too short, is there, or is planned."""
        if position < self.limits.min_snapshot_tokens:
            return
        digest = sequence.keys.digest(position)
        if self.snapshots.touch(digest) or any(digest == p.digest for p in self._step.saves):
            return
        number = self.snapshots.reserve()
        if number is not None:
            planned = PlannedSave(sequence, number, digest, position, is_periodic)
            self._step.saves.append(planned)

    def _add_planned(self) -> list[Save]:
        """Make what was planned findable. An abort cannot take it back any more."""
        saves = [planned.save() for planned in self._step.saves]
        for planned in self._step.saves:
            self._add(planned)
        self._step.saves.clear()
        return saves

    def _add(self, planned: PlannedSave) -> None:
        sequence, position = planned.sequence, planned.position
        pages = sequence.pages[: position // PAGE_TOKENS]
        snapshot = Snapshot(planned.number, planned.digest, position, pages)
        self.snapshots.add(snapshot)
        if not planned.is_periodic:
            return
        sequence.periodic.append(snapshot)
        if len(sequence.periodic) > NUM_RECENT:
            oldest = sequence.periodic.popleft()
            if (oldest.position // self.limits.snapshot_every).bit_count() != 1:
                self.snapshots.drop(oldest)


@dataclass(slots=True)
class _Step:
    """What the plan in the making holds so far; its saves wait for the commit."""

    restores: list[Restore] = field(default_factory=list)
    saves: list[PlannedSave] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)


def _shares(wants: abc.Sequence[int], budget: int) -> list[int]:
    """Split a budget evenly, nobody getting more than wanted; what is left goes to the first."""
    level, left = 0, budget
    for rank, wanted in enumerate(sorted(wants)):
        level = left // (len(wants) - rank)
        left -= min(wanted, level)
        if wanted > level:
            break  # all that are left get the same
    shares = [min(wanted, level) for wanted in wants]
    left = budget - sum(shares)
    for i, wanted in enumerate(wants):
        more = min(wanted - shares[i], left)
        shares[i] += more
        left -= more
    return shares
