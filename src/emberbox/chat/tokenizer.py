"""Text to token ids and back, from the checkpoint's `tokenizer.json` (byte-level BPE).

Promises that plain text never becomes a special token: special ids come only from the special runs
of a `TemplateText`, or from a string its caller vouches for (`encode_template`). Every added token
counts as special, whatever its own flag says: released files differ in how they flag `<think>`.
Knows no message format and no model; the model's vocabulary may have spare rows above `vocab_size`.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import tokenizers

from emberbox.chat.template_text import TemplateText, TokenGuard, whole_unicode
from emberbox.errors import CheckpointError, RequestError

TOKENIZER_FILE = "tokenizer.json"
# Ids index tables in memory; vocabularies in the wild stay below a sixteenth of it.
MAX_TOKEN_ID = 2**24 - 1

# Special tokens that structure a reply (architecture.md 9). Parsers need to see them as text.
MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)


class Tokenizer:
    """Immutable once open; may be used from several threads."""

    def __init__(
        self, plain: tokenizers.Tokenizer, special_tokens: Mapping[str, int], path: Path
    ) -> None:
        self._plain = plain  # holds no added token, so that it cannot find one
        self._special = MappingProxyType(dict(special_tokens))
        self._guard = TokenGuard(special_tokens)
        self._path = path

    @classmethod
    def open(cls, folder: Path) -> "Tokenizer":
        """Reads `folder/tokenizer.json`; CheckpointError when it is missing or unsuitable."""
        path = Path(folder) / TOKENIZER_FILE
        document = read_tokenizer_json(path)
        special = special_tokens_of(document, path)
        _check_byte_level(document, path)
        try:
            plain = tokenizers.Tokenizer.from_str(json.dumps(document | {"added_tokens": []}))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"{path}: the tokenizers library refuses it: {error}") from error
        tokenizer = cls(plain, special, path)
        tokenizer._check_ids()
        tokenizer._check_specials_stay_plain()
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Highest token id plus one."""
        return len(self._token_bytes)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Every added token: text -> id."""
        return self._special

    @cached_property
    def markup_ids(self) -> frozenset[int]:
        """Ids of those `MARKUP_TOKENS` that this tokenizer has; for `decode` and `Detokenizer`."""
        return frozenset(self._special[name] for name in MARKUP_TOKENS if name in self._special)

    def special_id(self, name: str) -> int:
        """Id of a special token such as `<|user|>`; CheckpointError when there is none."""
        if name not in self._special:
            raise CheckpointError(f"{self._path}: there is no special token {name!r}")
        return self._special[name]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; what looks like a special token is encoded letter by letter.

        Half a surrogate pair, which JSON can smuggle in and UTF-8 cannot hold, becomes U+FFFD.
        """
        ids: list[int] = self._plain.encode(whole_unicode(text), add_special_tokens=False).ids
        return ids

    def encode_template(self, text: TemplateText | str) -> list[int]:
        """Ids of a rendered prompt: special runs as their id, each plain run on its own.

        A `str` must come from a trusted writer: every special token in it becomes special.
        """
        trusted = self._guard.runs(text) if isinstance(text, str) else text
        ids: list[int] = []
        for run in trusted.runs:
            if run.is_special:
                ids.append(self.special_id(run.text))
            else:
                ids.extend(self.encode(run.text))
        return ids

    def decode(self, ids: Sequence[int], *, keep: Collection[int] | None = None) -> str:
        """Text of `ids`; special tokens are left out except those in `keep` (None: `markup_ids`).

        Bytes that are no UTF-8 become U+FFFD. Ids from `vocab_size` on give nothing (the model's
        spare rows); negative ones are a RequestError.
        """
        shown = self.markup_ids if keep is None else keep
        data = b"".join(self.token_bytes(token_id, keep=shown) for token_id in ids)
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, keep: Collection[int] = ()) -> bytes:
        """The bytes one token stands for; empty for special tokens not in `keep`."""
        if token_id < 0:
            raise RequestError(f"token id {token_id} is negative", param="prompt")
        if token_id >= len(self._token_bytes):
            return b""
        if token_id in self._special_ids and token_id not in keep:
            return b""
        return self._token_bytes[token_id]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._special.values())

    @cached_property
    def _token_bytes(self) -> tuple[bytes, ...]:
        vocab: dict[str, int] = self._plain.get_vocab(with_added_tokens=False)
        table = [b""] * (1 + max([*vocab.values(), *self._special.values()], default=-1))
        byte_of_char = _byte_of_char()
        for token, token_id in vocab.items():
            table[token_id] = _bytes_of_token(token, byte_of_char)
        for token, token_id in self._special.items():
            table[token_id] = token.encode()
        return tuple(table)

    def _check_ids(self) -> None:
        """No id beyond the limit, and none that is a special token and another word at once."""
        name_of_id = {token_id: name for name, token_id in self._special.items()}
        for word, token_id in self._plain.get_vocab(with_added_tokens=False).items():
            if token_id > MAX_TOKEN_ID:
                raise CheckpointError(
                    f"{self._path}: {word!r} has id {token_id}; the highest allowed is "
                    f"{MAX_TOKEN_ID}"
                )
            if name_of_id.get(token_id, word) != word:
                raise CheckpointError(
                    f"{self._path}: id {token_id} is the added token {name_of_id[token_id]!r} and "
                    f"the word {word!r} of the vocabulary"
                )

    def _check_specials_stay_plain(self) -> None:
        """A vocabulary that also holds a special token as a word would let text reach its id."""
        for name in self._special:
            if not self._special_ids.isdisjoint(self.encode(name)):
                raise CheckpointError(
                    f"{self._path}: {name!r} is an added token and a word of the vocabulary, "
                    "so plain text could produce it"
                )


def read_tokenizer_json(path: Path) -> dict[str, object]:
    """The parsed file; CheckpointError when it is missing, not JSON or not an object."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: not there; a checkpoint needs its tokenizer",
            hint=f"copy {TOKENIZER_FILE} of the model beside its weights",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document


def special_tokens_of(document: Mapping[str, object], path: Path) -> dict[str, int]:
    """Added tokens of a parsed tokenizer.json, text -> id; CheckpointError on an odd one."""
    added = document.get("added_tokens", [])
    if not isinstance(added, list):
        raise CheckpointError(f"{path}: added_tokens is no list")
    tokens: dict[str, int] = {}
    for index, entry in enumerate(added):
        where = f"{path}: added_tokens[{index}]"
        if not isinstance(entry, dict):
            raise CheckpointError(f"{where} is no object")
        content, token_id = entry.get("content"), entry.get("id")
        if not isinstance(content, str) or not content or type(token_id) is not int or token_id < 0:
            raise CheckpointError(f"{where} lacks a text content or a number id")
        if token_id > MAX_TOKEN_ID:
            raise CheckpointError(
                f"{where} ({content!r}) has id {token_id}; the highest allowed is {MAX_TOKEN_ID}"
            )
        # Tokens that swallow blanks around them could not be encoded run by run.
        options = [name for name in ("lstrip", "rstrip", "single_word") if entry.get(name)]
        if options:
            raise CheckpointError(
                f"{where} ({content!r}) sets {options[0]}, which is not supported"
            )
        if content in tokens or token_id in tokens.values():
            raise CheckpointError(f"{where} ({content!r}, {token_id}) is there twice")
        tokens[content] = token_id
    return tokens


def _check_byte_level(document: Mapping[str, object], path: Path) -> None:
    model, decoder = document.get("model"), document.get("decoder")
    kind = model.get("type") if isinstance(model, dict) else None
    if kind != "BPE":
        raise CheckpointError(f"{path}: expected a BPE model, found {kind!r}")
    decoder_kind = decoder.get("type") if isinstance(decoder, dict) else None
    if decoder_kind != "ByteLevel":
        raise CheckpointError(f"{path}: expected a ByteLevel decoder, found {decoder_kind!r}")


def _byte_of_char() -> dict[str, int]:
    """The byte behind each letter of a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards in byte order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _bytes_of_token(token: str, byte_of_char: Mapping[str, int]) -> bytes:
    # A word with a letter outside the byte alphabet stands for itself, as tokenizers has it.
    if all(char in byte_of_char for char in token):
        return bytes(byte_of_char[char] for char in token)
    return token.encode()
