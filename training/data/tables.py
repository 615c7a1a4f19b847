"""The generator's fixed material: words, facts and wordings, from the files in `tables/`."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tables"


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
    """Intent -> wordings, of all three files; a name in two of them is a mistake."""
    out: dict[str, Wordings] = {}
    for name in ("wordings.toml", "tools.toml", "pictures.toml"):
        for intent, entry in _read_toml(name).items():
            if intent in out:
                raise ValueError(f"{name}: {intent} stands in another file too; rename it")
            out[intent] = _wordings(entry)
    return out


@cache
def small_talk() -> tuple[Talk, ...]:
    """tables/small_talk.toml"""
    entries = _read_toml("small_talk.toml")["talk"]
    return tuple(Talk(entry["reply"], _wordings(entry)) for entry in entries)


def held_out_text(name: str) -> tuple[str, ...]:
    """Documents of `prose` or `code` from packages that training never reads."""
    path = FOLDER / f"held_out_{name}.txt"
    return tuple(path.read_text(encoding="utf-8").split("\f"))


def _wordings(entry: Mapping[str, Any]) -> Wordings:
    return Wordings(tuple(entry["seen"]), tuple(entry["held_out"]))


def _read_json(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return raw


def _read_toml(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))
