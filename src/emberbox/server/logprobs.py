"""Log-probabilities of tokens in the two shapes of the wire. Knows no reply.

JSON has no infinity, so a token that could not have been chosen has LEAST_LOGPROB.
"""

import codecs
from collections.abc import Callable

from emberbox.engine.request import TokenLogprob, TokenLogprobs
from emberbox.server.protocol import TextLogprobs, TokenAlternative, TokenEntry

LEAST_LOGPROB = -9999.0

TokenText = Callable[[int], tuple[str, bytes]]
ReplyBytes = Callable[[int], bytes]


def chat_entry(logprobs: TokenLogprobs, token_text: TokenText) -> TokenEntry:
    """The newer shape: one object per token."""
    chosen = _alternative(logprobs.chosen, token_text)
    return TokenEntry(
        token=chosen.token,
        bytes=chosen.bytes,
        logprob=chosen.logprob,
        top_logprobs=[_alternative(one, token_text) for one in logprobs.top],
    )


class TextColumns:
    """The older shape: columns that grow by a token, or what one chunk adds to them.

    `reply_bytes`: what a token adds to the text.
    """

    def __init__(self, token_text: TokenText, reply_bytes: ReplyBytes) -> None:
        self._token_text, self._reply_bytes = token_text, reply_bytes
        self._rows: list[tuple[str, float, dict[str, float], int]] = []
        self._place = LetterPlace()

    def push(self, logprobs: TokenLogprobs) -> None:
        """Take one token. The chosen token is always among the top."""
        top = {
            _name(one, self._token_text): _finite(one.logprob)
            for one in (logprobs.chosen, *logprobs.top)
        }
        name = _name(logprobs.chosen, self._token_text)
        offset = self._place.push(self._reply_bytes(logprobs.chosen.token_id))
        self._rows.append((name, _finite(logprobs.chosen.logprob), top, offset))

    def last(self) -> TextLogprobs:
        """The columns of the last token alone."""
        return _columns(self._rows[-1:])

    def whole(self) -> TextLogprobs:
        """The columns of all tokens."""
        return _columns(self._rows)


class LetterPlace:
    """Finds the letter of a text that each token begins in, as the text's bytes come.

    A letter may be made of several tokens; they all begin in it.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_letters = 0  # whole ones

    def push(self, data: bytes) -> int:
        """The index of the letter that the first of `data` belongs to; of none, the next one's."""
        self._num_letters += len(self._decoder.decode(data[:1]))
        is_open = bool(self._decoder.getstate()[0])
        index = self._num_letters - (bool(data) and not is_open)
        self._num_letters += len(self._decoder.decode(data[1:]))
        return index


def _columns(rows: list[tuple[str, float, dict[str, float], int]]) -> TextLogprobs:
    return TextLogprobs(
        tokens=[row[0] for row in rows],
        token_logprobs=[row[1] for row in rows],
        top_logprobs=[row[2] for row in rows],
        text_offset=[row[3] for row in rows],
    )


def _alternative(one: TokenLogprob, token_text: TokenText) -> TokenAlternative:
    text, data = token_text(one.token_id)
    return TokenAlternative(token=text, bytes=list(data), logprob=_finite(one.logprob))


def _name(one: TokenLogprob, token_text: TokenText) -> str:
    """The token's text; part of a letter as bytes:\\xe2, so that no two tokens share a name."""
    text, data = token_text(one.token_id)
    if text.encode(errors="replace") == data:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
