"""Token ids to text as they arrive, never splitting a character.

The pieces joined equal `Tokenizer.decode` of all ids, for every way of cutting the stream. A
character whose bytes are not all there yet is held back; what can no longer become a character is
U+FFFD, as in the full decode. Knows no stop strings and no markup.
"""

import codecs
from collections.abc import Collection, Iterable

from emberbox.chat.tokenizer import Tokenizer


class Detokenizer:
    """One per stream. Work per token is proportional to its own bytes."""

    def __init__(self, tokenizer: Tokenizer, *, keep: Collection[int] | None = None) -> None:
        """`keep`: special tokens to show, as in `Tokenizer.decode`; None: its `markup_ids`."""
        self._tokenizer = tokenizer
        self._keep = tokenizer.markup_ids if keep is None else frozenset(keep)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain with `ids`; may be empty."""
        data = b"".join(self._tokenizer.token_bytes(i, keep=self._keep) for i in ids)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is still held back: U+FFFD for a cut character, else nothing. Ready for reuse."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest

    def copy(self) -> "Detokenizer":
        """An independent detokenizer at the same point; a rejected draft is fed to a copy."""
        twin = Detokenizer(self._tokenizer, keep=self._keep)
        twin._decoder.setstate(self._decoder.getstate())
        return twin
