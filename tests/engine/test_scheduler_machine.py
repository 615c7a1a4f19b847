"""Any order of requests, steps, aborts and evictions keeps every promise of the scheduler."""

from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from emberbox.engine.plan import Limits, Result
from tests.engine.paper_device import PAGE, Engine

IMAGE, IMAGE_AT = 7, range(70, 90)


def stream(family: int, num_tokens: int) -> list[int]:
    """The tokens that all requests of a family begin with, and that replies go on with."""
    rng = Random(family)
    tokens = [rng.randrange(10, 50) for _ in range(num_tokens)]
    return [IMAGE if at in IMAGE_AT else token for at, token in enumerate(tokens)]


STREAMS = [stream(family, 1024) for family in range(2)]
MAX_MODEL_LEN = 450


class SchedulerMachine(RuleBasedStateMachine):
    """The paper device checks each plan; the rules only have to make trouble."""

    engine: Engine | None = None

    @initialize(
        num_pages=st.integers(3, 9),
        num_slots=st.sampled_from([1, 2, 3, 4, 4]),
        num_snapshots=st.integers(0, 5),
        prefill_tokens=st.sampled_from([3, 64, 150, 1000]),
        every=st.sampled_from([16, 64, 100]),
        least=st.sampled_from([1, 30, 64]),
    )
    def start(self, num_pages, num_slots, num_snapshots, prefill_tokens, every, least):
        self.engine = Engine(
            Limits(
                num_pages=num_pages,
                num_slots=num_slots,
                num_snapshots=num_snapshots,
                prefill_tokens=prefill_tokens,
                max_model_len=MAX_MODEL_LEN,
                snapshot_every=every,
                min_snapshot_tokens=least,
            )
        )

    @rule(seed=st.integers(0, 2**16), num_requests=st.integers(1, 5))
    def submit(self, seed, num_requests):
        for rng in [Random(seed + i) for i in range(num_requests)]:
            self._submit(rng)

    def _submit(self, rng):
        room = min(MAX_MODEL_LEN, self.engine.limits.num_pages * PAGE)
        num_prompt = rng.choice([rng.randint(1, 300), rng.choice([64, 128, 191, 192])])
        num_prompt = min(num_prompt, room - 1)
        tokens = STREAMS[rng.randrange(2)][:num_prompt]
        tokens[-1] += rng.randrange(2)  # half of them share all but the last token
        picture = rng.randrange(1, 3)
        self.engine.submit(
            tokens,
            [-picture if token == IMAGE else token for token in tokens],
            max_tokens=min(rng.randint(1, 200), room - num_prompt),
            suffix=min(rng.randrange(5), num_prompt),
        )

    @precondition(lambda self: self.engine.asked)
    @rule(which=st.integers(0, 99))
    def abort(self, which):
        ids = list(self.engine.asked)
        self.engine.abort(ids[which % len(ids)])

    @rule(seed=st.integers(0, 2**16), luck=st.sampled_from([0, 0.7]))
    def many_steps(self, seed, luck):
        """Requests keep coming while others run and end."""
        rng = Random(seed)
        for _ in range(40):
            if len(self.engine.asked) < 6 and rng.random() < 0.3:
                self._submit(rng)
            if self.engine.asked:
                self._step(rng, luck, finish_rate=0.01)

    @precondition(lambda self: self.engine.asked)
    @rule(seed=st.integers(0, 2**16))
    def step_with_an_abort_inside(self, seed):
        rng = Random(seed)
        self._step(rng, 0.5, finish_rate=0.1, abort=rng.choice(list(self.engine.asked)))

    @precondition(lambda self: self.engine.asked)
    @rule(seed=st.integers(0, 2**16))
    def finish_most(self, seed):
        self._step(Random(seed), 0.5, finish_rate=0.7)

    def _step(self, rng, luck, *, finish_rate, abort=None):
        def propose(request_id, most):
            assert 1 <= most <= 7
            return [rng.randrange(10, 50) for _ in range(rng.randint(0, most) if luck else 0)]

        plan = self.engine.schedule(propose)
        if abort is not None:
            self.engine.abort(abort)
        self.engine.forward(plan)
        results = {}
        for work in plan.work:
            if work.samples and work.request_id in self.engine.asked:
                results[work.request_id] = self._result(work, rng, luck, finish_rate)
        if plan.work:
            self.engine.commit(plan, results)

    def _result(self, work, rng, luck, finish_rate):
        asked = self.engine.asked[work.request_id]
        num_right = 0
        while num_right < work.num_drafts and rng.random() < luck:
            num_right += 1
        drafts = work.token_ids[len(work.token_ids) - work.num_drafts :][:num_right]
        token = STREAMS[work.request_id % 2][len(asked.tokens)]
        tokens = (*drafts, token)
        is_finished = len(tokens) == asked.num_left or rng.random() < finish_rate
        return Result(tokens, is_finished)

    @rule()
    def drop_all_snapshots(self):
        self.engine.scheduler.snapshots.clear()
        self.engine.check_holders()

    @invariant()
    def pages_and_snapshots_are_accounted_for(self):
        if self.engine is not None:
            self.engine.check_holders()
            self.engine.check_snapshots()

    def teardown(self):
        if self.engine is None or self.engine.scheduler._plan is not None:
            return  # a rule failed in the middle of a step
        self.engine.drain(propose=lambda request_id, most: [11] * most, accept=7)
        self.engine.scheduler.snapshots.clear()
        assert self.engine.scheduler.pool.num_free == self.engine.limits.num_pages


TestSchedulerMachine = SchedulerMachine.TestCase
