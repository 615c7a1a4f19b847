"""What a JSON value must look like, as functions that say what is wrong. Knows no receipt.

A Kind is handed a value and its place ("results.kl.value") and yields a sentence per problem.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import cast

Kind = Callable[[object, str], Iterator[str]]

MAX_TEXT = 20_000  # a recipe may stand in a receipt
MAX_ENTRIES = 10_000
_MAX_DEPTH = 6
_SHOWN = 40
_LARGEST = 1e300  # also false for NaN and infinity
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_PLAIN_KEY = re.compile(r"[\w.-]{1,100}", re.ASCII)


def matching(pattern: str, meaning: str) -> Kind:
    """A text that fits `pattern` as a whole; `meaning` says so to people."""
    compiled = re.compile(pattern)

    def check(value: object, at: str) -> Iterator[str]:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            yield _expected(value, at, meaning)

    return check


def exactly(*allowed: str | int) -> Kind:
    """One of these values, and of its type."""

    def check(value: object, at: str) -> Iterator[str]:
        if not any(type(value) is type(each) and value == each for each in allowed):
            yield _expected(value, at, " or ".join(repr(each) for each in allowed))

    return check


def label(value: object, at: str) -> Iterator[str]:
    """A text of one line that a terminal shows as it is: no control characters."""
    yield from text(value, at)
    if isinstance(value, str) and _CONTROL.search(value):
        yield _expected(value, at, "a line of text without control characters")


def text(value: object, at: str) -> Iterator[str]:
    """A text that can be written and is not endless."""
    if not isinstance(value, str):
        yield _expected(value, at, "a text")
    elif len(value) > MAX_TEXT:
        yield f"{at} has {len(value)} characters, at most {MAX_TEXT}"
    elif any(0xD800 <= ord(letter) <= 0xDFFF for letter in value):
        yield f"{at} holds an unpaired surrogate"


def flag(value: object, at: str) -> Iterator[str]:
    """True or false."""
    if not isinstance(value, bool):
        yield _expected(value, at, "true or false")


def number(low: float = -math.inf, high: float = math.inf) -> Kind:
    """A finite number in [low, high]."""

    def check(value: object, at: str) -> Iterator[str]:
        is_number = type(value) in (int, float) and abs(cast("float", value)) <= _LARGEST
        if not is_number or not low <= cast("float", value) <= high:
            limits = f"from {low:g}" if math.isfinite(low) else "that is finite"
            limits += f" to {high:g}" if math.isfinite(high) else ""
            yield _expected(value, at, f"a number {limits}")

    return check


def whole(low: int, high: int = 1 << 62) -> Kind:
    """An integer in [low, high]."""

    def check(value: object, at: str) -> Iterator[str]:
        if type(value) is not int or not low <= value <= high:
            yield _expected(value, at, f"a whole number from {low} to {high}")

    return check


def maybe(kind: Kind) -> Kind:
    """What `kind` takes, or null."""

    def check(value: object, at: str) -> Iterator[str]:
        if value is not None:
            yield from kind(value, at)

    return check


def table(kinds: Mapping[str, Kind]) -> Kind:
    """An object with exactly these keys."""

    def check(value: object, at: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield _expected(value, at, "an object")
            return
        for key in sorted(value.keys() - kinds.keys()):
            yield f"{_inside(at, key)} is unknown"
        for key, kind in kinds.items():
            if key not in value:
                yield f"{_inside(at, key)} is missing"
            else:
                yield from kind(value[key], _inside(at, key))

    return check


def mapping(kind: Kind) -> Kind:
    """An object with any keys, each value of one kind."""

    def check(value: object, at: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield _expected(value, at, "an object")
        elif len(value) > MAX_ENTRIES:
            yield f"{at} has {len(value)} entries, at most {MAX_ENTRIES}"
        else:
            for key, each in value.items():
                yield from text(key, f"a name in {at}")
                yield from kind(each, _inside(at, key))

    return check


def listing(kind: Kind, low: int = 0, high: int = MAX_ENTRIES) -> Kind:
    """A list of `low` to `high` values of one kind."""

    def check(value: object, at: str) -> Iterator[str]:
        if not isinstance(value, list):
            yield _expected(value, at, "a list")
        elif not low <= len(value) <= high:
            yield f"{at} has {len(value)} entries, expected {low} to {high}"
        else:
            for index, each in enumerate(value):
                yield from kind(each, f"{at}[{index}]")

    return check


def facts(value: object, at: str, depth: int = 0, of_text: Kind | None = None) -> Iterator[str]:
    """Any JSON that can be written again: finite numbers, texts (or `of_text`), not too deep."""

    def inner(each: object, place: str) -> Iterator[str]:
        yield from facts(each, place, depth + 1, of_text)

    if depth > _MAX_DEPTH:
        yield f"{at} is nested too deeply"
    elif isinstance(value, str):
        yield from (of_text or text)(value, at)
    elif isinstance(value, dict):
        yield from mapping(inner)(value, at)
    elif isinstance(value, list):
        yield from listing(inner)(value, at)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from number()(value, at)


def _inside(at: str, key: str) -> str:
    name = key if _PLAIN_KEY.fullmatch(key) else ascii(key[:_SHOWN])
    return f"{at}.{name}" if at else name


def _expected(value: object, at: str, what: str) -> str:
    shown = ascii(value)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return f"{at or 'the document'} is {shown}, expected {what}"
