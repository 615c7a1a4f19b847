"""The shipped nano model's chat format, and the tokenizers library as the thing to agree with."""

from pathlib import Path

import pytest
import tokenizers

from emberbox.chat.template import ChatTemplate
from emberbox.chat.tokenizer import Tokenizer

NANO = Path(__file__).parents[2] / "models" / "ember-nano"


@pytest.fixture(scope="session")
def nano_folder() -> Path:
    return NANO


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(NANO)


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate.open(NANO)


@pytest.fixture(scope="session")
def library_tokenizer() -> tokenizers.Tokenizer:
    """Parses special tokens wherever they stand, as training did with its own text."""
    return tokenizers.Tokenizer.from_file(str(NANO / "tokenizer.json"))
