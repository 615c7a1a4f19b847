"""What a request gives when it is alone: on a fresh engine, nothing saved, nothing drafted."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from emberbox.engine.core import Drafter, Engine
from emberbox.engine.llm import LLM
from emberbox.engine.plan import Limits
from emberbox.engine.request import FinishReason, SamplingParams
from emberbox.engine.sampler import Sampler, draw, uniform_of
from emberbox.engine.token_reader import TokenReader
from emberbox.ops.sample_rows import sample_rows
from tests.engine.engine_world import MOST_TOKENS, Ask, World

NEAR_LOGITS, NEAR_UNIFORM = 1e-3, 1e-4


@dataclass(frozen=True, slots=True)
class Cold:
    """A whole reply."""

    tokens: tuple[int, ...]
    text: str
    finish: FinishReason


class ColdRuns:
    """Runs alone, each made once. Replies of several budgets are cut from the longest."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._runs: dict[object, Cold] = {}
        self.world: Callable[[int], World] = cache(lambda number: World(number, llm))

    def engine(self, limits: Limits, drafter: Drafter | None = None) -> Engine:
        """A fresh engine of that size."""
        memory = replace(
            self.llm.memory,
            num_pages=limits.num_pages,
            num_slots=limits.num_slots,
            num_snapshots=limits.num_snapshots,
            max_model_len=limits.max_model_len,
        )
        make = self.llm._detokenizer
        return Engine(self.llm.network, memory, make, drafter=drafter, limits=limits)

    def of(self, ask: Ask) -> Cold:
        """The reply within the request's own budget."""
        longest = replace(ask, params=replace(ask.params, max_tokens=MOST_TOKENS))
        pixels = tuple(patches.pixel_values.tobytes() for patches in ask.images)
        key = (longest.prompt.token_ids, pixels, longest.params)
        if key not in self._runs:
            self._runs[key] = self._run(longest)
        whole, budget = self._runs[key], ask.params.max_tokens or MOST_TOKENS
        return whole if budget >= len(whole.tokens) else self._cut(whole.tokens[:budget])

    def is_near_tie(self, ask: Ask, cold: Cold, at: int, got: int) -> bool:
        """Whether rounding may turn token `at` of the reply into `got`."""
        ids = (*ask.prompt.token_ids, *cold.tokens[:at])
        hidden = torch.cat(list(self.llm.hidden(replace(ask.prompt, token_ids=ids, key_ids=None))))
        rows = self.llm.network.logits(hidden[len(ask.prompt.token_ids) - 1 :])
        near = abs(float(rows[at, cold.tokens[at]] - rows[at, got])) < NEAR_LOGITS
        return near or (ask.params.temperature > 0 and got in self._near_draws(ask, cold, rows, at))

    def _near_draws(self, ask: Ask, cold: Cold, rows: torch.Tensor, at: int) -> set[int]:
        params = ask.params
        ends = () if params.ignore_eos else self.llm.config.text.eos_token_ids
        sampler = Sampler(params, ask.prompt.token_ids, ends)
        for i in range(at):
            sampler.sample(rows[i], cold.tokens[i])
        scores, uniform = sampler.scores(rows[at]), uniform_of(params.seed, at)
        moved = (max(uniform - NEAR_UNIFORM, 0.0), min(uniform + NEAR_UNIFORM, 1.0))
        return {draw(scores, params, number) for number in moved}

    def _run(self, ask: Ask) -> Cold:
        length = len(ask.prompt.token_ids) + MOST_TOKENS
        limits = Limits(
            num_pages=-(-length // 64),
            num_slots=1,
            num_snapshots=0,
            prefill_tokens=length,
            max_model_len=length,
        )
        engine = self.engine(limits)
        engine.submit(0, ask.prompt, ask.params)
        events = []
        while engine.has_work:
            events += [each.event for each in engine.step()]
        text = "".join(event.text for event in events)
        return Cold(tuple(event.token_id for event in events), text, events[-1].finish)

    def _cut(self, tokens: tuple[int, ...]) -> Cold:
        """The reply of a budget that ends it here: the same tokens, and their text."""
        params = SamplingParams(ignore_eos=True)
        reader = TokenReader(params, self.llm._detokenizer(), (), len(tokens), (), sample_rows)
        events = [event for token in tokens for event in reader.read(None, [token], ())]
        return Cold(tokens, "".join(event.text for event in events), events[-1].finish)
