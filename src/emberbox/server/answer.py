"""What a request's choices say, in the shape of its route: chunks as they come, or the whole.

A stream sends what `push` gives; a plain answer is filled with `add` and sent as `whole`. Knows no
HTTP.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from emberbox.engine.request import TokenEvent
from emberbox.server.logprobs import ReplyBytes, TextColumns, TokenText, chat_entry
from emberbox.server.protocol import (
    ChatCompletion,
    ChatLogprobs,
    Choice,
    Chunk,
    ChunkChoice,
    CompletionDetails,
    Delta,
    PromptDetails,
    ReplyMessage,
    TextChoice,
    TextCompletion,
    TokenEntry,
    Usage,
)
from emberbox.server.reply import Piece, Reply, TextReply, finish_reason
from emberbox.server.worker import Delivery


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What every chunk and answer of one request repeats, and how its answer is made."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    num_prompt_tokens: tuple[int, ...]  # of each prompt
    num_choices: int  # per prompt; choice i of prompt p has the index p * num_choices + i
    token_text: TokenText
    reply_bytes: ReplyBytes
    has_continuous_usage: bool = False


class Answer(ABC):
    """All choices of one request while they grow."""

    def __init__(self, heading: Heading) -> None:
        self.heading = heading
        self._cached = [0] * len(heading.num_prompt_tokens)
        self._num_left = len(self._cached) * heading.num_choices
        self._started: set[int] = set()

    @property
    def is_whole(self) -> bool:
        """Whether every choice has come to its end."""
        return not self._num_left

    def add(self, delivery: Delivery) -> None:
        """Take one delivery, for `whole` alone. Raises what ended a choice early."""
        event, _ = self._note(delivery)
        self._take(delivery.index, event)

    def push(self, delivery: Delivery) -> list[msgspec.Struct]:
        """Take one delivery; the chunks that follow from it. Raises what ended a choice early."""
        event, is_first = self._note(delivery)
        return self._chunks(delivery.index, event, is_first)

    def _note(self, delivery: Delivery) -> tuple[TokenEvent, bool]:
        """The event, and whether it is the first of its choice."""
        event, index = delivery.event, delivery.index
        if isinstance(event, Exception):
            raise event
        is_first = index not in self._started
        if is_first:
            self._started.add(index)
            prompt, choice = divmod(index, self.heading.num_choices)
            # Later choices of a prompt find what the first one left: that is no saving to report.
            self._cached[prompt] += delivery.num_cached if choice == 0 else 0
        self._num_left -= event.finish is not None
        return event, is_first

    def usage(self) -> Usage:
        """Counts so far; a prompt counts once, however many choices it has."""
        replies = self._replies()
        num_prompt = sum(self.heading.num_prompt_tokens)
        num_tokens = sum(reply.num_tokens for reply in replies)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_tokens,
            total_tokens=num_prompt + num_tokens,
            prompt_tokens_details=PromptDetails(sum(self._cached)),
            completion_tokens_details=CompletionDetails(
                sum(reply.num_reasoning_tokens for reply in replies)
            ),
        )

    def _running_usage(self) -> Usage | msgspec.UnsetType:
        return self.usage() if self.heading.has_continuous_usage else msgspec.UNSET

    @abstractmethod
    def whole(self) -> msgspec.Struct:
        """The plain answer."""

    @abstractmethod
    def usage_chunk(self) -> msgspec.Struct:
        """The last chunk of a stream that asks for its usage; it has no choices."""

    @abstractmethod
    def _take(self, index: int, event: TokenEvent) -> object:
        """Let one choice grow; what it grew by."""

    @abstractmethod
    def _chunks(self, index: int, event: TokenEvent, is_first: bool) -> list[msgspec.Struct]: ...

    @abstractmethod
    def _replies(self) -> Sequence[Reply | TextReply]: ...


class ChatAnswer(Answer):
    """The choices of a chat completion. `thinking`: the prompt leaves them in their reasoning."""

    def __init__(self, heading: Heading, *, thinking: bool) -> None:
        super().__init__(heading)
        self._choices = [Reply(thinking=thinking) for _ in range(heading.num_choices)]
        self._entries: list[list[TokenEntry]] = [[] for _ in self._choices]

    def whole(self) -> ChatCompletion:
        """The plain answer."""
        return ChatCompletion(
            id=self.heading.id,
            created=self.heading.created,
            model=self.heading.model,
            system_fingerprint=self.heading.system_fingerprint,
            choices=[self._choice(index) for index in range(len(self._choices))],
            usage=self.usage(),
        )

    def usage_chunk(self) -> Chunk:
        """The last chunk of a stream that asks for its usage; it has no choices."""
        return self._chunk([], self.usage())

    def _choice(self, index: int) -> Choice:
        reply, entries = self._choices[index], self._entries[index]
        reasoning = reply.reasoning or None
        content = reply.content or (None if reasoning else "")
        return Choice(
            ReplyMessage(content=content, reasoning_content=reasoning),
            finish_reason(reply.finish) or "stop",
            index,
            ChatLogprobs(entries) if entries else None,
        )

    def _take(self, index: int, event: TokenEvent) -> Piece:
        if event.logprobs is not None:
            self._entries[index].append(chat_entry(event.logprobs, self.heading.token_text))
        return self._choices[index].push(event)

    def _chunks(self, index: int, event: TokenEvent, is_first: bool) -> list[msgspec.Struct]:
        delta = self._take(index, event).to_delta()
        choices = []
        if is_first:
            choices.append(ChunkChoice(Delta(role="assistant", content=""), None, index))
        logprobs = None if event.logprobs is None else ChatLogprobs(self._entries[index][-1:])
        if logprobs or delta.content or delta.reasoning_content:
            choices.append(ChunkChoice(delta, None, index, logprobs))
        if event.finish is not None:
            choices.append(ChunkChoice(Delta(), finish_reason(event.finish), index))
        return [self._chunk([choice], self._running_usage()) for choice in choices]

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | msgspec.UnsetType) -> Chunk:
        return Chunk(
            id=self.heading.id,
            created=self.heading.created,
            model=self.heading.model,
            system_fingerprint=self.heading.system_fingerprint,
            choices=choices,
            usage=usage,
        )

    def _replies(self) -> Sequence[Reply]:
        return self._choices


class TextAnswer(Answer):
    """The choices of a text completion, those of its first prompt first."""

    def __init__(self, heading: Heading) -> None:
        super().__init__(heading)
        self._choices = [TextReply() for _ in range(self._num_left)]
        self._columns: dict[int, TextColumns] = {}

    def whole(self) -> TextCompletion:
        """The plain answer."""
        choices = [
            TextChoice(
                reply.content,
                index,
                finish_reason(reply.finish),
                self._columns[index].whole() if index in self._columns else None,
            )
            for index, reply in enumerate(self._choices)
        ]
        return self._completion(choices, self.usage())

    def usage_chunk(self) -> TextCompletion:
        """The last chunk of a stream that asks for its usage; it has no choices."""
        return self._completion([], self.usage())

    def _take(self, index: int, event: TokenEvent) -> str:
        if event.logprobs is not None:
            if index not in self._columns:
                heading = self.heading
                self._columns[index] = TextColumns(heading.token_text, heading.reply_bytes)
            self._columns[index].push(event.logprobs)
        return self._choices[index].push(event)

    def _chunks(self, index: int, event: TokenEvent, is_first: bool) -> list[msgspec.Struct]:
        text = self._take(index, event)
        logprobs = None if event.logprobs is None else self._columns[index].last()
        if not (text or logprobs or event.finish is not None):
            return []
        choice = TextChoice(text, index, finish_reason(event.finish), logprobs)
        return [self._completion([choice], self._running_usage())]

    def _completion(
        self, choices: list[TextChoice], usage: Usage | msgspec.UnsetType
    ) -> TextCompletion:
        return TextCompletion(
            id=self.heading.id,
            created=self.heading.created,
            model=self.heading.model,
            system_fingerprint=self.heading.system_fingerprint,
            choices=choices,
            usage=usage,
        )

    def _replies(self) -> Sequence[TextReply]:
        return self._choices
