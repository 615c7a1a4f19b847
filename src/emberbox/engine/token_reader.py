"""From sampled tokens to events: text, stop tokens, stop strings, the budget. Knows no network."""

from emberbox.chat.detokenizer import Detokenizer
from emberbox.chat.parser import StopMatcher
from emberbox.engine.request import FinishReason, SamplingParams, TokenEvent
from emberbox.engine.sampler import Sampler


class TokenReader:
    """Text and end of one reply: stop tokens, stop strings, the budget."""

    def __init__(
        self, params: SamplingParams, detokenizer: Detokenizer, eos: tuple[int, ...], budget: int
    ) -> None:
        self.sampler, self.stops = Sampler(params), StopMatcher(params.stop)
        self.detokenizer, self.eos, self.left = detokenizer, eos, budget

    def accept(self, token: int) -> TokenEvent:
        """The event of the next token."""
        self.left -= 1
        text = "" if token in self.eos else self.stops.push(self.detokenizer.push([token]))
        if self.stops.matched is not None:
            return TokenEvent(token, text, FinishReason.STOP)
        if token not in self.eos and self.left:
            return TokenEvent(token, text)
        text += self.stops.push(self.detokenizer.finish())
        is_stopped = token in self.eos or self.stops.matched is not None
        text += "" if self.stops.matched is not None else self.stops.finish()
        return TokenEvent(token, text, FinishReason.STOP if is_stopped else FinishReason.LENGTH)
