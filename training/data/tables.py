"""The generator's fixed material: words, facts and wordings, from the files in `tables/`."""

import json
import lzma
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tables"
SHORT_ONE_IN = 9  # lines of a grammar that are short forms


@dataclass(frozen=True, slots=True)
class Wordings:
    """Ways to say one thing; training never sees the held-out ones."""

    seen: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Talk:
    """A reply known by heart and what calls for it."""

    reply: str
    wordings: Wordings


@dataclass(frozen=True, slots=True)
class Words:
    """Building material of names, lists and echoes."""

    words: tuple[str, ...]
    names: tuple[str, ...]
    things: tuple[str, ...]
    places: tuple[str, ...]
    han: str
    hangul: str
    arabic: tuple[str, ...]
    emoji: tuple[str, ...]
    latin: tuple[str, ...]
    other: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the model knows by heart: question part -> answer part."""

    capitals: Mapping[str, str]
    elements: Mapping[str, str]
    opposites: Mapping[str, str]
    questions: Mapping[str, str]
    explain: Mapping[str, str]
    code: Mapping[str, str]


@cache
def words() -> Words:
    """tables/words.json"""
    raw: dict[str, Any] = {
        name: entry if isinstance(entry, str) else tuple(entry)
        for name, entry in _read_json("words.json").items()
    }
    return Words(**raw)


@cache
def facts() -> Facts:
    """tables/facts.json"""
    return Facts(**_read_json("facts.json"))


@cache
def wordings() -> Mapping[str, Wordings]:
    """Intent -> wordings, of all three files; a name in two of them is a mistake.

    What training says of the intents in codes.toml is a grammar, spelled out.
    """
    out: dict[str, Wordings] = {}
    grammars = _read_toml("codes.toml")
    for name in ("wordings.toml", "tools.toml", "pictures.toml"):
        for intent, entry in _read_toml(name).items():
            if intent in out:
                raise ValueError(f"{name}: {intent} stands in another file too; rename it")
            if intent in grammars:
                out[intent] = Wordings(spelled_out(grammars[intent]), tuple(entry["held_out"]))
            else:
                out[intent] = _wordings(entry)
    return out


def spelled_out(grammar: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Every sentence of a grammar of codes.toml: `value_first` and `name_first` alike in number."""
    around = list(product(grammar["openers"], grammar["tails"]))
    sides = [
        [way for frame in grammar[side] for way in alternatives(frame)]
        for side in ("value_first", "name_first")
    ]
    frames = [side[i % len(side)] for i in range(max(map(len, sides))) for side in sides]
    long = [_sentence(opener, frame, tail) for frame in frames for opener, tail in around]
    short = list(grammar["short"])
    return (*long, *short * (len(long) // ((SHORT_ONE_IN - 1) * len(short))))


def _sentence(opener: str, frame: str, tail: str) -> str:
    """Names and codes keep their letters at the beginning, words get a capital."""
    return opener + (frame if opener else frame[0].upper() + frame[1:]) + tail


def alternatives(pattern: str) -> list[str]:
    """All that `(a|b) c` stands for: `a c` and `b c`."""
    parts = [part.split("|") for part in re.split(r"[()]", pattern)]
    return ["".join(choice) for choice in product(*parts)]


@cache
def small_talk() -> tuple[Talk, ...]:
    """tables/small_talk.toml"""
    entries = _read_toml("small_talk.toml")["talk"]
    return tuple(Talk(entry["reply"], _wordings(entry)) for entry in entries)


def held_out_text(name: str) -> tuple[str, ...]:
    """Documents of `prose` or `code` from packages that training never reads."""
    packed = (FOLDER / f"held_out_{name}.txt.xz").read_bytes()
    return tuple(lzma.decompress(packed).decode().split("\f"))


def _wordings(entry: Mapping[str, Any]) -> Wordings:
    return Wordings(tuple(entry["seen"]), tuple(entry["held_out"]))


def _read_json(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return raw


def _read_toml(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))
