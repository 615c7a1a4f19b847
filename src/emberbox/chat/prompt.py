"""All of a checkpoint's chat format in one: messages in, token ids and pictures out.

Joins tokenizer, template and picture settings; holds no rule of its own. Knows no network: whether
the prompt fits the context is for the engine to say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from emberbox.chat.media import Patches, expand_media, prepare_media
from emberbox.chat.media_settings import MediaSettings
from emberbox.chat.messages import check_messages
from emberbox.chat.template import ChatTemplate
from emberbox.chat.tokenizer import Tokenizer


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
        add_generation_prompt: bool = True,
        reasoning_effort: str | None = None,
        enable_thinking: bool | None = None,
        clear_thinking: bool | None = None,
    ) -> tuple[list[int], list[Patches]]:
        """Token ids with all placeholders expanded, and the patches they stand for, in order.

        Options as in `ChatTemplate.render_text`. Raises RequestError naming the field at fault.
        """
        conversation = check_messages(messages)
        text = self.template.render_text(
            conversation,
            tools,
            add_generation_prompt,
            reasoning_effort=reasoning_effort,
            enable_thinking=enable_thinking,
            clear_thinking=clear_thinking,
        )
        patches = [prepare_media(ref, self.media) for ref in conversation.media]
        token_ids = self.tokenizer.encode_template(text)
        return expand_media(token_ids, patches, self.tokenizer) if patches else token_ids, patches
