"""Stretches of an engine's work under a stopwatch: one sequence decoding, or several replies.

Every step is the engine's own, scheduler and sampler included, and ends with its tokens on the
host. Knows no options and no receipt.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, Protocol, cast

from emberbox.engine.core import Engine
from emberbox.engine.plan import Work
from emberbox.engine.request import Prompt, RequestEvent, SamplingParams
from emberbox.engine.runner import ModelRunner
from emberbox.errors import MeasureError

# Tokens by which random drafts may be right in one run; more end it without a figure.
SPARE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Timed:
    """Tokens that came, milliseconds in all and of each step."""

    num_tokens: int
    wall_ms: float
    step_ms: tuple[float, ...]


class FillsCache(Protocol):
    """A runner that can pretend: rows of `slot` and of `pages` become random, as if computed."""

    def fill_random(self, slot: int, pages: Sequence[int], seed: int) -> None: ...


def room_of(num_steps: int, step_tokens: int) -> int:
    """Tokens that a reply of so many steps may have, the first and what drafts want included."""
    return 1 + num_steps + SPARE_TOKENS + step_tokens


class Stopwatch:
    """Times an idle engine. Prompts are random tokens, never twice the same."""

    def __init__(
        self, engine: Engine, seed: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`clock` gives seconds."""
        self.engine, self.seed, self.clock = engine, seed, clock
        self._random, self._ids = Random(seed), count()
        config, text = engine.config, engine.config.text
        self._excluded = {config.image_token_id, config.video_token_id, *text.eos_token_ids}

    def decode(
        self, context: int, steps: tuple[int, int], *, step_tokens: int, is_filled: bool
    ) -> Timed:
        """One sequence of at most `context` tokens at its end, greedy; `steps`: warm-up and timed.

        step_tokens - 1 random drafts are verified in every step. is_filled: all but the prompt's
        last chunk is not computed, the cache holds random rows in its place (`FillsCache`).
        """
        warm_up, num_timed = steps
        room = room_of(warm_up + num_timed, step_tokens)
        engine, (request_id,) = self.engine, self._submit(1, context - room, room)
        drafts = RandomDrafter(self, step_tokens - 1) if step_tokens > 1 else None
        drafter, engine.drafter = engine.drafter, drafts
        try:
            with _filling(engine, self.seed) if is_filled else _as_it_is():
                while not self._step():
                    pass
            for _ in range(warm_up):
                self._step()
            before = engine.stats().drafted_tokens
            timed = self._timed(lambda number: number < num_timed)
            drafted = engine.stats().drafted_tokens - before
        finally:
            engine.drafter = drafter
            engine.abort(request_id)
        if drafted != num_timed * (step_tokens - 1) or timed.num_tokens < num_timed:
            raise MeasureError(
                f"speed: {num_timed} steps verified {drafted} drafts and gave {timed.num_tokens} "
                f"tokens, {step_tokens - 1} drafts a step were asked for: no figure",
                hint="random drafts were right too often; take another --seed",
            )
        return timed

    def replies(self, num_requests: int, prompt_tokens: int, reply_tokens: int) -> Timed:
        """Requests submitted at once, timed from the first submission to the last token."""
        before = self.engine.stats().cached_tokens
        began = self.clock()
        self._submit(num_requests, prompt_tokens, reply_tokens)
        timed = self._timed(lambda _: self.engine.has_work, began)
        expected = num_requests * reply_tokens
        if timed.num_tokens != expected or self.engine.stats().cached_tokens != before:
            raise MeasureError(f"speed: {timed.num_tokens} tokens, expected {expected}: no figure")
        return timed

    def random_tokens(self, num_tokens: int) -> tuple[int, ...]:
        """Token ids that end nothing and stand for no picture."""
        vocab = self.engine.config.text.vocab_size
        out: list[int] = []
        while len(out) < num_tokens:
            token = self._random.randrange(vocab)
            if token not in self._excluded:
                out.append(token)
        return tuple(out)

    def _submit(self, num_requests: int, prompt_tokens: int, reply_tokens: int) -> list[int]:
        params = SamplingParams(max_tokens=reply_tokens, ignore_eos=True)
        ids = [next(self._ids) for _ in range(num_requests)]
        for request_id in ids:
            self.engine.submit(request_id, Prompt(self.random_tokens(prompt_tokens)), params)
        return ids

    def _timed(self, goes_on: Callable[[int], bool], began: float | None = None) -> Timed:
        """Steps while `goes_on(steps done)`; `began`: when the clock started, now if None."""
        last = self.clock()
        began = last if began is None else began
        num_tokens = 0
        step_ms: list[float] = []
        while goes_on(len(step_ms)):
            num_tokens += len(self._step())
            now = self.clock()
            step_ms.append(1e3 * (now - last))
            last = now
        return Timed(num_tokens, 1e3 * (last - began), tuple(step_ms))

    def _step(self) -> list[RequestEvent]:
        """One step's events. Raises what ended a request."""
        events = self.engine.step()
        for event in events:
            if event.error is not None:
                raise event.error
        return events


class RandomDrafter:
    """Proposes random tokens, as many as it is told: what verifying costs, whatever it is worth."""

    def __init__(self, watch: Stopwatch, num_drafts: int) -> None:
        self.watch, self.num_drafts = watch, num_drafts

    def propose(self, request_id: int, generated_so_far: Sequence[int], most: int) -> Sequence[int]:
        """At most `most` tokens."""
        return self.watch.random_tokens(min(self.num_drafts, most))


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _filling(engine: Engine, seed: int) -> Iterator[None]:
    """Inside, prompts are not computed but for their last chunk: the cache is filled."""
    runner = engine.runner
    if not hasattr(runner, "fill_random"):
        raise MeasureError(
            "speed: this engine cannot fill its cache with random rows", hint="use --fill prefill"
        )
    engine.runner = cast(ModelRunner, _FillingRunner(runner, seed))
    try:
        yield
    finally:
        engine.runner = runner


class _FillingRunner:
    """A runner whose prompts take no time; the scheduler plans them as always."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self._runner, self._seed = runner, seed

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever else a runner can do
        return getattr(self._runner, name)

    def forward(self, works: Sequence[Work], features: Mapping[int, Any]) -> Mapping[int, object]:
        """Of a prompt the last chunk alone is computed, on what the cache was filled with."""
        last = [work for work in works if work.samples]
        for work in last:
            cast(FillsCache, self._runner).fill_random(work.slot, work.pages, self._seed)
        return self._runner.forward(last, features) if last else {}
