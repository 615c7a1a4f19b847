"""The engine: requests in, one step at a time, events out.

A step asks the scheduler for a plan, runs it, lets each reply read its rows, and commits what was
accepted. One thread owns an engine; only `check` may be called from others. Knows no HTTP and no
chat format.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from emberbox.chat.detokenizer import Detokenizer
from emberbox.engine.memory_plan import MemoryPlan
from emberbox.engine.pictures import PromptPictures
from emberbox.engine.plan import Arrival, Limits, Plan, Result, Work
from emberbox.engine.prefix_keys import prefix_keys
from emberbox.engine.request import (
    EngineStats,
    Prompt,
    RequestEvent,
    SamplingParams,
    TokenEvent,
)
from emberbox.engine.runner import Features, ModelRunner, Sampled
from emberbox.engine.scheduler import Scheduler
from emberbox.engine.token_reader import TokenReader
from emberbox.errors import ContextLengthError, NonFiniteLogits, RequestError
from emberbox.model.network import Network


class Drafter(Protocol):
    """Guesses the next tokens of a reply; the network verifies them."""

    def propose(
        self, request_id: int, generated_so_far: Sequence[int], most: int
    ) -> Sequence[int]: ...


@dataclass(slots=True)
class _Reply:
    """What the engine keeps of one request."""

    num_prompt: int
    reader: TokenReader
    num_cached: int | None = None  # known when it is admitted first
    generated: list[int] = field(default_factory=list)
    pictures: PromptPictures | None = None


class Engine:
    """Continuous batching over one network.

    `make_detokenizer` makes one per reply. `limits` are for tests; they follow from the memory
    plan.
    """

    def __init__(
        self,
        network: Network,
        memory: MemoryPlan,
        make_detokenizer: Callable[[], Detokenizer],
        *,
        drafter: Drafter | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.memory, self.config = memory, network.config
        self.runner = ModelRunner(network, memory)
        self.scheduler = Scheduler(limits or limits_of(memory))
        self.drafter = drafter
        self._make_detokenizer = make_detokenizer
        self._replies: dict[int, _Reply] = {}
        self._stepping = Lock()
        self._counters = dict.fromkeys(COUNTERS, 0)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def check(self, prompt: Prompt, params: SamplingParams) -> int:
        """Tokens the reply may have. Raises RequestError or ContextLengthError before any work."""
        self.check_prompt(prompt)
        self._check_ids(params)
        num_prompt = len(prompt.token_ids)
        held = self.memory.max_model_len
        room = held - num_prompt
        wanted = params.max_tokens if params.max_tokens is not None else max(room, 1)
        if wanted > room:
            raise ContextLengthError(
                f"the context holds {held} tokens; the prompt has {num_prompt} and the reply may "
                f"have {wanted}, {num_prompt + wanted} in all",
                param="messages",
                hint=f"shorten the prompt or ask for at most {max(room, 0)} tokens",
            )
        return wanted

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises RequestError for an empty prompt, an unknown token id, or images that do not
        match their tokens."""
        if not prompt.token_ids:
            raise RequestError("the prompt holds no tokens", param="prompt")
        vocab = self.config.text.vocab_size
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < vocab:
            at, token = next((i, t) for i, t in enumerate(prompt.token_ids) if not 0 <= t < vocab)
            raise RequestError(
                f"token {token} at position {at} is outside the vocabulary of {vocab}",
                param="prompt",
            )
        num_tokens = prompt.token_ids.count(self.config.image_token_id)
        num_made = sum(patches.num_tokens for patches in prompt.images)
        if prompt.images and self.config.vision is None:
            raise RequestError("this checkpoint has no vision tower; send no images")
        if num_tokens != num_made:
            raise RequestError(
                f"the prompt has {num_tokens} image tokens, its images make {num_made}"
            )

    def submit(self, request_id: int, prompt: Prompt, params: SamplingParams) -> None:
        """Take a request; its events come from `step`. Raises as `check`, ValueError for an id
        that is in use."""
        budget = self.check(prompt, params)
        token_ids, images, image = prompt.token_ids, prompt.images, self.config.image_token_id
        keys = prompt.key_ids
        if keys is None:
            keys = prefix_keys(token_ids, images, image)
        eos = self.config.text.eos_token_ids
        draws = self.runner.network.ops.sample_rows
        reader = TokenReader(params, self._make_detokenizer(), eos, budget, token_ids, draws)
        reply = _Reply(len(token_ids), reader)
        if images:
            reply.pictures = PromptPictures(token_ids, images, image)
        self.scheduler.submit(
            Arrival(
                request_id=request_id,
                token_ids=token_ids,
                key_ids=keys,
                max_tokens=budget,
                num_suffix_tokens=prompt.num_suffix_tokens,
            )
        )
        self._replies[request_id] = reply

    def knows(self, request_id: int) -> bool:
        """Whether a request has been submitted and has not ended."""
        return request_id in self._replies

    def abort(self, request_id: int) -> None:
        """End a request without an event. One that has ended already is ignored."""
        if self._replies.pop(request_id, None) is not None:
            self.scheduler.abort(request_id)

    def step(self) -> list[RequestEvent]:
        """Compute one step of all requests.

        Logits that are not finite, and pictures that cannot be encoded, end their own request. Any
        other failure, an interrupt included, gives up every request of the step and is raised; the
        others go on with the next step. Raises RequestError when another thread is in a step.
        """
        if not self._stepping.acquire(blocking=False):
            raise RequestError(
                "another thread is in a step of this engine",
                hint="use an LLM from one thread, or serve it and ask over HTTP",
            )
        try:
            return self._step()
        finally:
            self._stepping.release()

    def _step(self) -> list[RequestEvent]:
        plan = self.scheduler.schedule(self._propose)
        if not plan.work:
            return []
        try:
            events = self._run(plan)
        except BaseException:
            self._give_up(plan)
            raise
        self._counters["steps"] += 1
        return events

    def _run(self, plan: Plan) -> list[RequestEvent]:
        self._note_admissions(plan)
        self.runner.restore(plan.restores)
        events: list[RequestEvent] = []
        features = self._features(plan, events)
        works = [work for work in plan.work if work.request_id in self._replies]
        sampled = self.runner.forward(works, features) if works else {}
        results: dict[int, Result] = {}
        for work in works:
            if work.samples:
                self._read(work, sampled[work.request_id], results, events)
        self._commit(plan, results)
        return events

    def _give_up(self, plan: Plan) -> None:
        """End the requests of a plan that was not carried out, so that the next step can be."""
        for work in plan.work:
            self.abort(work.request_id)
            self.runner.discard(work.slot)
        if self.scheduler.is_planned:
            self.scheduler.commit(plan, {})
        # One may be findable whose copy was not made.
        self.scheduler.snapshots.clear()

    def stats(self) -> EngineStats:
        """What is held now, and counters since the start."""
        counts = self.scheduler.counts()
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            pages_used=counts.pages_used,
            pages_total=counts.pages_total,
            snapshots_used=counts.snapshots_used,
            snapshots_total=counts.snapshots_total,
            num_preemptions=counts.num_preemptions,
            **self._counters,
        )

    def _check_ids(self, params: SamplingParams) -> None:
        vocab = self.config.text.vocab_size
        named = {
            "logit_bias": [token for token, _ in params.logit_bias],
            "stop_token_ids": params.stop_token_ids,
        }
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocab:
                    raise RequestError(
                        f"{name}: token {token} is outside the vocabulary of {vocab}", param=name
                    )

    def _propose(self, request_id: int, most: int) -> Sequence[int]:
        if self.drafter is None:
            return ()
        most = min(most, self.runner.max_drafts(self.scheduler.num_running))
        if most < 1:
            return ()
        return self.drafter.propose(request_id, self._replies[request_id].generated, most)

    def _note_admissions(self, plan: Plan) -> None:
        for admitted in plan.admitted:
            reply = self._replies[admitted.request_id]
            if reply.num_cached is None:
                # After a preemption a snapshot may hold more; what counts is the first time.
                reply.num_cached = admitted.num_cached
                self._counters["prompt_tokens"] += reply.num_prompt
                self._counters["cached_tokens"] += admitted.num_cached

    def _features(self, plan: Plan, events: list[RequestEvent]) -> dict[int, Features]:
        """Embeddings of the image tokens in each chunk; who cannot have them ends here."""
        features: dict[int, Features] = {}
        for work in plan.work:
            pictures = self._replies[work.request_id].pictures
            if pictures is None:
                continue
            stop = work.position + len(work.token_ids)
            try:
                rows = pictures.rows(self.runner.encode, work.position, stop)
            except Exception as error:  # torch raises many kinds, one for want of memory too
                self._fail(work, error, events)
            else:
                features[work.request_id] = rows
        return features

    def _fail(self, work: Work, error: Exception, events: list[RequestEvent]) -> None:
        num_cached = self._replies[work.request_id].num_cached or 0
        self.abort(work.request_id)
        self.runner.discard(work.slot)
        events.append(RequestEvent(work.request_id, None, error, num_cached))

    def _read(
        self,
        work: Work,
        sampled: Sampled,
        results: dict[int, Result],
        events: list[RequestEvent],
    ) -> None:
        """Let one reply choose from its rows, up to the first that is not finite."""
        reply = self._replies[work.request_id]
        if not sampled.num_finite:
            error = NonFiniteLogits(
                "the logits hold values that are not finite",
                hint="the checkpoint is damaged, or its config.json does not belong to it",
            )
            self._fail(work, error, events)
            return
        num_drafts = min(work.num_drafts, sampled.num_finite - 1)
        first = len(work.token_ids) - work.num_drafts
        drafts = work.token_ids[first : first + num_drafts]
        read = reply.reader.read(sampled.logits, sampled.greedy[: 1 + num_drafts], drafts)
        num_cached = reply.num_cached or 0
        events += [RequestEvent(work.request_id, event, None, num_cached) for event in read]
        tokens = tuple(_token(event) for event in read)
        reply.generated += tokens
        results[work.request_id] = Result(tokens, reply.reader.is_finished)
        self._counters["generated_tokens"] += len(tokens)
        self._counters["drafted_tokens"] += work.num_drafts
        self._counters["accepted_tokens"] += len(tokens) - 1

    def _commit(self, plan: Plan, results: dict[int, Result]) -> None:
        self.runner.commit(
            {
                work.slot: len(results[work.request_id].tokens) - 1
                for work in plan.work
                if work.num_drafts and work.request_id in results
            }
        )
        self.runner.save(plan.saves)  # one that a failed request took back is found by nobody
        ended = self.scheduler.commit(plan, results)
        for request_id, result in results.items():
            if result.is_finished:
                del self._replies[request_id]
        self.runner.save(ended)


COUNTERS = (
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "steps",
)


def limits_of(memory: MemoryPlan) -> Limits:
    """The scheduler's limits from the plan's numbers."""
    return Limits(
        num_pages=memory.num_pages,
        num_slots=memory.num_slots,
        num_snapshots=memory.num_snapshots,
        prefill_tokens=memory.prefill_tokens,
        max_model_len=memory.max_model_len,
    )


def _token(event: TokenEvent) -> int:
    assert event.token_id is not None, "a reader's events carry tokens"
    return event.token_id
