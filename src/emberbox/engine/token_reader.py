"""From the logits of a verified run to events: tokens, text, and the reply's end.

Knows no network and no scheduler. The events do not depend on how a reply is cut into runs, nor on
which drafts came with them.
"""

import copy
from collections.abc import Sequence

from torch import Tensor

from emberbox.chat.detokenizer import Detokenizer
from emberbox.chat.parser import StopMatcher
from emberbox.engine.request import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from emberbox.engine.sampler import Draws, Sampler


class TokenReader:
    """The state of one reply: its sampler, its text, stop tokens, stop strings, the budget."""

    def __init__(
        self,
        params: SamplingParams,
        detokenizer: Detokenizer,
        eos: Sequence[int],
        budget: int,
        prompt_ids: Sequence[int],
        draws: Draws,
    ) -> None:
        """`eos`: the model's end tokens. `budget`: tokens the reply may have, at least 1. `draws`:
        ops/sample_rows in the form of the logits' device."""
        own = () if params.ignore_eos else eos
        self._eos_ids = frozenset(eos)
        self._stop_ids = frozenset((*own, *params.stop_token_ids))
        self._sampler = Sampler(params, prompt_ids, sorted(self._stop_ids), draws)
        self._stops, self._detokenizer = StopMatcher(params.stop), detokenizer
        self._params, self._is_plain_greedy = params, params.is_plain_greedy
        self._budget = budget
        self.num_tokens = 0
        self.is_finished = False

    def read(
        self, rows: Tensor, greedy: Sequence[int], drafts: Sequence[int]
    ) -> tuple[TokenEvent, ...]:
        """The events of one run: the accepted drafts in order, then one token of its own.

        rows [1 + k, V] float32: row j are the logits after j drafts; greedy: the argmax of each;
        drafts: k of them. At least one event. A reply that ends gives its last event and ignores
        what is left of the run. Plain greedy never touches `rows`.
        """
        assert len(greedy) == 1 + len(drafts), "a row for the last token and for every draft"
        assert not self.is_finished, "the reply has ended"
        events: list[TokenEvent] = []
        for at in range(len(greedy)):
            token, logprobs = self._choose(rows, greedy[at], at)
            events.append(self._event(token, logprobs))
            if self.is_finished or at == len(drafts) or token != drafts[at]:
                break
        return tuple(events)

    def copy(self) -> "TokenReader":
        """An independent reader at the same point; both go on to give the same events."""
        twin = copy.copy(self)
        twin._sampler, twin._stops = self._sampler.copy(), self._stops.copy()
        twin._detokenizer = self._detokenizer.copy()
        return twin

    def _choose(self, rows: Tensor, greedy: int, at: int) -> tuple[int, TokenLogprobs | None]:
        if self._is_plain_greedy:
            return greedy, None
        return self._sampler.sample(rows[at], greedy)

    def _event(self, token: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        self.num_tokens += 1
        is_end = token in self._stop_ids
        text = "" if is_end else self._certain(self._detokenizer.push([token]))
        is_last = is_end or self.num_tokens == self._budget
        if is_last:  # nothing more comes out of either once a stop string has matched
            text += self._certain(self._detokenizer.finish())
            text += self._stops.finish()
        finish = None
        if is_end or self._stops.matched is not None:
            finish = FinishReason.STOP
        elif is_last:
            finish = FinishReason.LENGTH
        self.is_finished = finish is not None
        is_own_end = is_end and token in self._eos_ids and self._stops.matched is None
        return TokenEvent(token, text, finish, logprobs, is_own_end)

    def _certain(self, text: str) -> str:
        """The part of new text that no stop string can take back any more."""
        if self.num_tokens <= self._params.min_tokens:
            return text
        return self._stops.push(text)
