"""Do the files of one checkpoint speak of the same model? Config, tokenizer and picture settings.

Each was read strictly by itself; a wrong pair would start and then misread what it is sent.
"""

from collections.abc import Iterator

from emberbox.chat.prompt import ChatFormat
from emberbox.errors import LoadRefused
from emberbox.model.config import Glm5NextConfig

PROBE = "agreement of template and model"


def check_agreement(config: Glm5NextConfig, chat: ChatFormat, where: str) -> None:
    """Raises LoadRefused with every disagreement between config.json and the chat's files."""
    reasons = [*_token_reasons(config, chat), *_picture_reasons(config, chat)]
    rendered = chat.template.render([{"role": "user", "content": PROBE}])
    if PROBE not in rendered:
        reasons.append("the chat template leaves out the text of a user's message")
    if reasons:
        raise LoadRefused(where, reasons, hint="take all files from one release")


def _token_reasons(config: Glm5NextConfig, chat: ChatFormat) -> Iterator[str]:
    vocab, size = config.text.vocab_size, chat.tokenizer.vocab_size
    if size > vocab:
        yield f"the tokenizer has {size} tokens, text_config.vocab_size is {vocab}"
    if config.vision is None:
        return
    for name, key in (
        ("<|image|>", "image_token_id"),
        ("<|begin_of_image|>", "image_start_token_id"),
        ("<|end_of_image|>", "image_end_token_id"),
    ):
        found, expected = chat.tokenizer.special_tokens.get(name), getattr(config, key)
        if found != expected:
            yield f"{name} is token {found} in the tokenizer, {key} is {expected}"


def _picture_reasons(config: Glm5NextConfig, chat: ChatFormat) -> Iterator[str]:
    if config.vision is None:
        return
    for key, expected in (
        ("patch_size", config.vision.patch_size),
        ("temporal_patch_size", config.vision.temporal_patch_size),
        ("merge_size", config.vision.spatial_merge_size),
    ):
        found = getattr(chat.media, key)
        if found != expected:
            yield f"preprocessor {key} is {found}, vision_config says {expected}"
