"""One choice while it grows: token events in, pieces of reasoning and content out.

Used by plain and streamed answers alike. A reply that the model ends by itself, without closing its
reasoning, has skipped it: its text is the content. A stream has by then sent it as reasoning, and
sends it once more as content; a plain answer has it as content alone. One that a stop of the
request's ends was still thinking. Knows no HTTP.
"""

from dataclasses import dataclass

from emberbox.chat.parser import ReasoningParser
from emberbox.engine.request import FinishReason, TokenEvent
from emberbox.server.protocol import Delta


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became certain: some of the reasoning, some of the content, either may be empty."""

    reasoning: str
    content: str

    def to_delta(self) -> Delta:
        """The chunk's delta; an empty one when there is nothing to send."""
        return Delta(content=self.content or None, reasoning_content=self.reasoning or None)


class Reply:
    """The state of one reply. `thinking`: the prompt left it inside its reasoning."""

    def __init__(self, *, thinking: bool) -> None:
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish: FinishReason | None = None
        self._parser = ReasoningParser(thinking=thinking)
        # Pieces, joined when asked for: adding to a string copies all of it for every token.
        self._reasoning: list[str] = []
        self._content: list[str] = []

    @property
    def reasoning(self) -> str:
        """All of the thought so far."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """All of the answer so far."""
        return "".join(self._content)

    def push(self, event: TokenEvent) -> Piece:
        """Take one event; the last one carries a finish reason and flushes what was held back."""
        self.num_tokens += event.token_id is not None
        # The token that closes the reasoning is counted as part of it.
        self.num_reasoning_tokens += self._parser.is_inside and event.token_id is not None
        reasoning, content = self._parser.push(event.text)
        if event.finish is not None:
            self.finish = event.finish
            last = self._parser.finish()
            reasoning, content = reasoning + last.reasoning, content + last.content
        self._reasoning.append(reasoning)
        self._content.append(content)
        if event.is_own_end and self._parser.is_inside:
            content = self.reasoning
            self._reasoning, self._content = [], [content]
            self.num_reasoning_tokens = 0
        return Piece(reasoning, content)


class TextReply:
    """The state of one text completion: markers are text, there is no reasoning."""

    num_reasoning_tokens = 0

    def __init__(self) -> None:
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self._texts: list[str] = []

    @property
    def content(self) -> str:
        """All of the text so far."""
        return "".join(self._texts)

    def push(self, event: TokenEvent) -> str:
        """Take one event; the text that it adds."""
        self.num_tokens += event.token_id is not None
        self._texts.append(event.text)
        self.finish = event.finish
        return event.text


def finish_reason(finish: FinishReason | None) -> str | None:
    """The wire's word for how a reply ended; None while it goes on."""
    if finish is None:
        return None
    return "length" if finish is FinishReason.LENGTH else "stop"
