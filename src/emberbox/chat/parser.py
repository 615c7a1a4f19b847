"""Splits a reply's text while it streams: reasoning from answer, and the end at a stop string.

Fed text deltas cut anywhere; what comes out does not depend on the cuts. Text is held back only
while it may still turn into a marker, and look-alikes (`</thinking>`, `</thin`) come out unchanged.
Knows no tokens: the caller shows `<think>` and `</think>` as text (`Tokenizer.markup_ids`).
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from emberbox.errors import RequestError

OPEN = "<think>"
CLOSE = "</think>"

# Blanks allowed before a marker at the front. Bounded, or endless newlines would be held back.
MAX_FRONT_BLANKS = 64


class ReasoningDelta(NamedTuple):
    """New text of both channels; either may be empty."""

    reasoning: str
    content: str


class _State(enum.Enum):
    BEFORE_REASONING = enum.auto()  # inside by prompt, nothing seen: a repeated <think> is dropped
    REASONING = enum.auto()
    BEFORE_CONTENT = enum.auto()  # only blanks seen: a lone </think> is dropped, <think> opens
    AFTER_REASONING = enum.auto()  # as before, but the one block of reasoning is over
    CONTENT = enum.auto()


class ReasoningParser:
    """One per reply. `thinking`: the prompt ended in an open `<think>`
    (`TemplateText.starts_in_reasoning`).

    A reply has at most one block of reasoning, at its front. A `<think>` that repeats the prompt's
    is dropped, and so is a lone `</think>` before the first letter of the answer. Any marker after
    that is content.
    """

    def __init__(self, *, thinking: bool) -> None:
        self._state = _State.BEFORE_REASONING if thinking else _State.BEFORE_CONTENT
        self._held = ""
        self.is_closed = False  # whether a </think> ended the reasoning

    @property
    def is_inside(self) -> bool:
        """Whether the next text belongs to the reasoning."""
        return self._state in (_State.BEFORE_REASONING, _State.REASONING)

    def push(self, delta: str) -> ReasoningDelta:
        """Takes more text, gives what is certain."""
        self._held += delta
        reasoning: list[str] = []
        content: list[str] = []
        while self._held and self._state is not _State.CONTENT:
            target = reasoning if self.is_inside else content
            before = (self._state, len(self._held))
            target.append(self._advance())
            if before == (self._state, len(self._held)):
                return ReasoningDelta("".join(reasoning), "".join(content))
        content.append(self._held)
        self._held = ""
        return ReasoningDelta("".join(reasoning), "".join(content))

    def finish(self) -> ReasoningDelta:
        """The end of the reply: what was held back turns out to be ordinary text."""
        rest, self._held = self._held, ""
        return ReasoningDelta(rest, "") if self.is_inside else ReasoningDelta("", rest)

    def copy(self) -> "ReasoningParser":
        """An independent parser at the same point; a rejected draft is fed to a copy."""
        twin = ReasoningParser(thinking=False)
        twin._state, twin._held, twin.is_closed = self._state, self._held, self.is_closed
        return twin

    def _advance(self) -> str:
        """One step on the held text: returns what leaves it for the present channel."""
        if self._state is _State.REASONING:
            return self._advance_reasoning()
        return self._advance_front()

    def _advance_reasoning(self) -> str:
        text, marker, rest = self._held.partition(CLOSE)
        if marker:
            self._held, self._state, self.is_closed = rest, _State.AFTER_REASONING, True
            return text
        num_held = _suffix_that_begins(self._held, (CLOSE,))
        cut = len(self._held) - num_held
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _advance_front(self) -> str:
        """Before the first letter of a channel, where a marker may still be dropped or open one."""
        letters = self._held.lstrip()
        blanks = self._held[: len(self._held) - len(letters)]
        markers = self._front_markers() if len(blanks) <= MAX_FRONT_BLANKS else {}
        for marker, state in markers.items():
            if letters.startswith(marker):
                self._held, self._state = letters[len(marker) :], state
                self.is_closed = self.is_closed or state is _State.AFTER_REASONING
                return "" if state is _State.REASONING else blanks
        if any(marker.startswith(letters) for marker in markers):
            return ""
        self._state = _State.REASONING if self.is_inside else _State.CONTENT
        return ""

    def _front_markers(self) -> dict[str, _State]:
        if self._state is _State.AFTER_REASONING:
            return {CLOSE: _State.AFTER_REASONING}
        return {OPEN: _State.REASONING, CLOSE: _State.AFTER_REASONING}


def split_reasoning(
    text: str, *, thinking: bool, stopped_by_itself: bool
) -> tuple[str | None, str]:
    """(reasoning or None, content) of a whole reply.

    A reply that stopped by itself without closing its reasoning has skipped it: all is content.
    One cut by the token limit was still thinking: all is reasoning, content is empty.
    """
    parser = ReasoningParser(thinking=thinking)
    first, last = parser.push(text), parser.finish()
    reasoning, content = first.reasoning + last.reasoning, first.content + last.content
    if parser.is_inside and thinking and stopped_by_itself:
        return None, reasoning
    return reasoning or None, content


class StopMatcher:
    """Ends a text before a stop string. One per reply; an empty list of stops passes all.

    The stop whose last letter comes first wins (of two ending together, the longer), so the result
    is the same for every cutting of the text and a finished stop never waits for a longer one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise RequestError(
                    f"stop[{index}] is {stop!r}; a stop string has at least one character",
                    param=f"stop[{index}]",
                )
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str) -> str:
        """Text that is safe to show. After a match (`matched`) nothing more comes out."""
        if self.matched is not None:
            return ""
        text = self._held + delta
        found = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)]
        cut = len(text) - _suffix_that_begins(text, self._stops)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The end of the text: what was held back was no stop string."""
        rest, self._held = self._held, ""
        return rest

    def copy(self) -> "StopMatcher":
        """An independent matcher at the same point; a rejected draft is fed to a copy."""
        twin = StopMatcher(self._stops)
        twin._held, twin.matched = self._held, self.matched
        return twin


def _suffix_that_begins(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning, not the whole, of a marker."""
    longest = max(map(len, markers), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0
