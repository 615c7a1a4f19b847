"""One reply while it grows: token events in, pieces of reasoning and content out.

Used by plain and streamed answers alike. A reply that stops by itself without closing its reasoning
has skipped it: its text is the content. A stream has by then sent it as reasoning, and sends it
once more as content; a plain answer has it as content alone. Knows no HTTP.
"""

from dataclasses import dataclass

from emberbox.chat.parser import ReasoningParser
from emberbox.engine.request import FinishReason, TokenEvent
from emberbox.server.protocol import CompletionDetails, Delta, PromptDetails, Usage


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became certain: some of the reasoning, some of the content, either may be empty."""

    reasoning: str
    content: str

    def to_delta(self) -> Delta | None:
        """The chunk's delta, or None when there is nothing to send."""
        if not self.reasoning and not self.content:
            return None
        return Delta(content=self.content or None, reasoning_content=self.reasoning or None)


class Reply:
    """The state of one reply."""

    def __init__(self, *, num_prompt_tokens: int, enable_thinking: bool) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.reasoning = ""
        self.content = ""
        self.finish: FinishReason | None = None
        self._parser = ReasoningParser(thinking=enable_thinking)

    def push(self, event: TokenEvent) -> Piece:
        """Take one event; the last one carries a finish reason and flushes what was held back."""
        # A last event without a token has the id -1.
        self.num_tokens += event.token_id is not None
        # The token that closes the reasoning is counted as part of it.
        self.num_reasoning_tokens += self._parser.is_inside and event.token_id is not None
        reasoning, content = self._parser.push(event.text)
        if event.finish is not None:
            self.finish = event.finish
            last = self._parser.finish()
            reasoning, content = reasoning + last.reasoning, content + last.content
        self.reasoning += reasoning
        self.content += content
        if event.finish is FinishReason.STOP and self._parser.is_inside:
            content, self.content, self.reasoning = self.reasoning, self.reasoning, ""
            self.num_reasoning_tokens = 0
        return Piece(reasoning, content)

    @property
    def finish_reason(self) -> str:
        """The wire's word for how it ended."""
        return "length" if self.finish is FinishReason.LENGTH else "stop"

    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_tokens,
            total_tokens=self.num_prompt_tokens + self.num_tokens,
            prompt_tokens_details=PromptDetails(),
            completion_tokens_details=CompletionDetails(self.num_reasoning_tokens),
        )
