"""All of a checkpoint's chat format in one: messages in, token ids and pictures out.

Joins tokenizer, template and picture settings. A prompt that will not fit is refused before its
pictures are decoded; how much fits is for the caller to say. Knows no network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from emberbox.chat.media import (
    Patches,
    expand_media,
    measure_media,
    num_expanded,
    prepare_media,
)
from emberbox.chat.media_settings import MediaSettings
from emberbox.chat.messages import MediaRef, check_messages
from emberbox.chat.template import ChatTemplate
from emberbox.chat.tokenizer import Tokenizer
from emberbox.errors import ContextLengthError


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What `open` read; may be used from several threads."""

    tokenizer: Tokenizer
    template: ChatTemplate
    media: MediaSettings

    @classmethod
    def open(cls, folder: Path) -> "ChatFormat":
        """Reads tokenizer, template and preprocessor of a checkpoint. Raises CheckpointError."""
        return cls(Tokenizer.open(folder), ChatTemplate.open(folder), MediaSettings.open(folder))

    def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        reasoning_effort: str | None = None,
        enable_thinking: bool | None = None,
        clear_thinking: bool | None = None,
        max_tokens: int | None = None,
    ) -> tuple[list[int], list[Patches]]:
        """Token ids with all placeholders expanded, and the patches they stand for, in order.

        Options as in `ChatTemplate.render_text`. Raises RequestError naming the field at fault, and
        ContextLengthError for more than `max_tokens` tokens; None sets no limit.
        """
        conversation = check_messages(messages)
        text = self.template.render_text(
            conversation,
            tools,
            reasoning_effort=reasoning_effort,
            enable_thinking=enable_thinking,
            clear_thinking=clear_thinking,
        )
        token_ids = self.tokenizer.encode_template(text)
        _check_length(self._least_length(token_ids, conversation.media), max_tokens)
        patches = [prepare_media(ref, self.media) for ref in conversation.media]
        if patches:
            token_ids = expand_media(token_ids, patches, self.tokenizer)
        # Once more: a picture that turned out to lie on its side may have a few tokens more.
        _check_length(len(token_ids), max_tokens)
        return token_ids, patches

    def _least_length(self, token_ids: Sequence[int], media: Sequence[MediaRef]) -> int:
        """Tokens of the whole prompt, each placeholder counted as what its header promises."""
        layouts = (measure_media(ref, self.media) for ref in media)
        expanded = sum(num_expanded(layout, self.tokenizer) for layout in layouts)
        return len(token_ids) - len(media) + expanded


def _check_length(num_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        raise ContextLengthError(
            f"the context holds {max_tokens} tokens and the prompt has {num_tokens}",
            param="messages",
            hint="shorten the messages, or send fewer or smaller pictures",
        )
