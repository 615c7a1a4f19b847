"""Text that remembers which special tokens are real: the runs between template and tokenizer.

A rendered prompt is a row of runs, each one special token or plain text. Only the template can make
a special run. What a user, a tool or the model itself wrote is plain text even where it spells a
special token. Knows no tokenizer, no jinja and no message format.

How: before rendering, `TokenGuard.protect` puts a mark (a Unicode non-character that occurs nowhere
in the request) between the letters of every special token that a message spells. The template
renders that text, `TokenGuard.runs` splits it at the special tokens that are still whole, and takes
the marks out again. The text is then exactly what was written, and plain text on both sides of a
message's border stays one run, as the model was trained.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from emberbox.errors import RequestError

# Non-characters: Unicode reserves them for use inside one process, so text seldom holds any.
MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


@dataclass(frozen=True, slots=True)
class Run:
    """One special token (`is_special`) or a stretch of plain text; never empty."""

    text: str
    is_special: bool


@dataclass(frozen=True, slots=True)
class TemplateText:
    """A rendered prompt. Plain runs are never adjacent: token boundaries depend on that."""

    runs: tuple[Run, ...]

    @property
    def text(self) -> str:
        """The prompt as one string, as a person would read it."""
        return "".join(run.text for run in self.runs)

    @property
    def starts_in_reasoning(self) -> bool:
        """Whether the reply continues an open `<think>`; what `ReasoningParser` must be told."""
        return bool(self.runs) and self.runs[-1] == Run("<think>", is_special=True)

    def count(self, special_token: str) -> int:
        """How often the template itself wrote this special token."""
        return self.runs.count(Run(special_token, is_special=True))


class TokenGuard:
    """Keeps special tokens spelled in messages apart from those of the template."""

    def __init__(self, special_tokens: Collection[str]) -> None:
        # Longest first: of two tokens that begin at one place the longer one is meant.
        ordered = sorted(special_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._longest = max(map(len, ordered), default=0)
        self._prefixes = frozenset(t[:k] for t in ordered for k in range(1, len(t)))
        self._suffixes = frozenset(t[k:] for t in ordered for k in range(1, len(t)))

    def choose_mark(self, value: object) -> str:
        """A mark that occurs in no string within `value` (strings, lists and dicts, nested)."""
        used = {mark for text in _strings(value) for mark in MARKS if mark in text}
        for mark in MARKS:
            if mark not in used:
                return mark
        raise RequestError(
            "the messages hold all 32 Unicode non-characters U+FDD0 to U+FDEF; at most 31 fit",
            param="messages",
        )

    def protect(self, text: str, mark: str) -> str:
        """`text` with marks such that no special token can be found in it, nor across its ends.

        The ends matter: two pieces `<|us` and `er|>`, rendered side by side, spell a token that
        neither holds. Outer blanks stay outermost, so that a template's `trim` still works.
        """
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        head = mark if self._any_edge(core, self._suffixes, at_end=False) else ""
        tail = mark if self._any_edge(core, self._prefixes, at_end=True) else ""
        inner = self.protect_inside(core, mark)
        return f"{text[:start]}{head}{inner}{tail}{text[start + len(core) :]}"

    def protect_inside(self, text: str, mark: str) -> str:
        """Marks after every letter of each special token in `text`; the ends are left alone."""
        # After every letter, not after the first: tokens may overlap or hold one another.
        return self._pattern.sub(lambda m: "".join(char + mark for char in m.group()), text)

    def protect_all(self, value: object, mark: str) -> object:
        """`protect` on every string within lists and dicts, keys included."""
        if isinstance(value, str):
            return self.protect(value, mark)
        if isinstance(value, dict):
            return {self.protect_all(k, mark): self.protect_all(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect_all(item, mark) for item in value]
        return value

    def runs(self, text: str, mark: str = "") -> TemplateText:
        """Splits at the special tokens that are whole, then removes the marks from the rest."""
        runs: list[Run] = []
        end = 0
        for match in self._pattern.finditer(text):
            _append_plain(runs, text[end : match.start()], mark)
            runs.append(Run(match.group(), is_special=True))
            end = match.end()
        _append_plain(runs, text[end:], mark)
        return TemplateText(tuple(runs))

    def _any_edge(self, core: str, pieces: frozenset[str], *, at_end: bool) -> bool:
        lengths = range(1, min(self._longest, len(core) + 1))
        return any((core[-k:] if at_end else core[:k]) in pieces for k in lengths)


def remove_mark(value: object, mark: str) -> object:
    """The inverse of `TokenGuard.protect_all`."""
    if isinstance(value, str):
        return value.replace(mark, "")
    if isinstance(value, dict):
        return {remove_mark(k, mark): remove_mark(v, mark) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [remove_mark(item, mark) for item in value]
    return value


def whole_unicode(text: str) -> str:
    """`text` with surrogate pairs joined and lone halves replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _append_plain(runs: list[Run], text: str, mark: str) -> None:
    plain = text.replace(mark, "") if mark else text
    if plain:
        runs.append(Run(plain, is_special=False))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
