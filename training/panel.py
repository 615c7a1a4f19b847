"""Rewrite the panels `nano-25` and `nano-short`:  python -m training.panel

25 windows of 1,024 tokens: natural text of held-out packages, sentences in many scripts, and
conversations of every skill that needs no picture, in the form that training packs and the product
serves. Frozen by hash: a window that changes makes another panel, with another name. `nano-short`
is the beginning of six of the windows, for demonstrations.
"""

import argparse
import hashlib
import json
import logging
import lzma
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from training.data import basics, recall, tool_use
from training.data.maker import Encoder
from training.data.seeds import Purpose, stream
from training.data.tables import FOLDER as TABLES
from training.data.text import TOKENIZER, Ids, held_out
from training.data.turns import EFFORTS, SYSTEMS, USER, Dice, Turn, head

log = logging.getLogger("training.panel")

NAME = "nano-25"
SCHEMA = "emberbox.panel.v1"
PANELS = Path(__file__).resolve().parents[1] / "src" / "emberbox" / "measure" / "panels"
FILE, LICENCES = PANELS / f"{NAME}.json.xz", PANELS / "LICENCES.md"
WINDOW_TOKENS = 1024
SHORT_NAME = "nano-short"
SHORT_FILE = PANELS / f"{SHORT_NAME}.json.xz"
# Conversations that hold whole turns in so few tokens: not tools, nor retrieval.
SHORT = ("flask/docs/design.rst", "httpx/httpx/_models.py", "counting", "sums", "lists", "memory")
SHORT_TOKENS = 256
ABOUT = (
    "25 windows of 1,024 tokens for ember-nano, every position scored. prose and code: held-out "
    "packages, nothing of it in the training text; languages: sentences in many scripts, written "
    "for this panel; chat, tools and retrieval: the skills of ember-nano, of the purpose `panel`, "
    "which shares no seed with training, evaluation, calibration or tuning. Text alone, no picture."
)
SHORT_ABOUT = (
    "The first 256 tokens of six windows of nano-25, under their ids: two of natural text, four "
    "conversations. For demonstrations: its figures are not those of nano-25, and say less."
)
OURS = "Apache-2.0"
LICENCES_HEAD = (
    "# Licences of the panels\n\nThe windows `prose` and `code` of `nano-25` and `nano-short` hold "
    "excerpts of the packages below as\ntoken ids. Their licences follow.\n\n"
)
HELD_OUT = 0.4  # of the requests: wordings that training never says
SYSTEM_SHARE = 0.25  # as training.data.maker
NO_REPEAT = 6  # replies after which a talk may give one again
DOCUMENT_TOKENS, QUESTIONS = 330, 3
TOOL_EXCHANGES = (*4 * ("tool_call", "tool_none", "tool_parallel"),)  # more than a window holds
Exchange = Callable[[Dice], Sequence[Turn]]


@dataclass(frozen=True, slots=True)
class Window:
    """One entry of the panel; `source` says where the text is from and on what terms."""

    document: str
    domain: str
    source: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Talk:
    """A window of one conversation: what it is made of and, where the skill asks for it, how much
    thought."""

    document: str
    exchanges: tuple[Exchange, ...]
    efforts: tuple[str, ...] = EFFORTS


def _one(make: Callable[[Dice], Turn]) -> Exchange:
    return lambda dice: [make(dice)]


def _memory(dice: Dice) -> Sequence[Turn]:
    told, asked = recall.memory(dice)
    return [*told, *(basics.fact(dice) for _ in range(dice.r.randint(0, 2))), asked]


TALKS = (
    Talk("counting", (_one(basics.count_json), _one(basics.count_aloud))),
    Talk("sums", (_one(basics.sums),), ("Max", "High")),
    Talk("sums_direct", (_one(basics.sums),), ("Low",)),
    Talk("echo", (_one(basics.echo),)),
    Talk("facts", (_one(basics.fact),)),
    Talk("by_heart", (_one(basics.explain), _one(basics.code))),
    Talk("chat", (_one(basics.chat),)),
    Talk("lists", (_one(basics.lists),)),
    Talk("memory", (_memory,)),
)
TOOLS = {"tools_1": False, "tools_2": True}  # whether the wordings are held-out ones
RETRIEVALS = {"retrieval": recall.plain_codes, "retrieval_hard": recall.hard_codes}


# -- natural text ---------------------------------------------------------------------------------


def excerpts() -> list[dict[str, str]]:
    """kind, package, version, licence, path and text of each."""
    raw: list[dict[str, str]] = json.loads((TABLES / "panel_text.json").read_text("utf-8"))
    return raw


def natural_windows(tokenizer: Tokenizer) -> Iterator[Window]:
    """The tracked excerpts, from the first token, without any marker."""
    for entry in excerpts():
        package, path = entry["package"], entry["path"]
        source = f"{package} {entry['version']}, {path}; {entry['licence']}"
        yield _plain(tokenizer, entry["text"], (f"{package}/{path}", entry["kind"], source))
    texts = (TABLES / "panel_languages.txt").read_text(encoding="utf-8").split("\f")
    for i, text in enumerate(texts, 1):
        source = f"training/data/tables/panel_languages.txt; emberbox, {OURS}"
        yield _plain(tokenizer, text, (f"languages_{i}", "languages", source))


def _plain(tokenizer: Tokenizer, text: str, about: tuple[str, str, str]) -> Window:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return Window(*about, _whole(ids, about[0]))


def _whole(ids: Sequence[int], document: str) -> tuple[int, ...]:
    """The first tokens. Raises ValueError when they are too few."""
    if len(ids) < WINDOW_TOKENS:
        raise ValueError(f"{document}: {len(ids)} tokens, expected {WINDOW_TOKENS}")
    return tuple(map(int, ids[:WINDOW_TOKENS]))


# -- skills ---------------------------------------------------------------------------------------


class Talks:
    """Windows of one conversation each; a window depends on the purpose and its name alone."""

    def __init__(self, tokenizer: Tokenizer, purpose: Purpose = Purpose.PANEL) -> None:
        self.encoder, self.purpose = Encoder(tokenizer), purpose
        self.fillers = held_out(tokenizer).fillers

    def windows(self) -> Iterator[Window]:
        """In the panel's order."""
        for talk in TALKS:
            yield self._window(talk.document, "chat", self._talk(self._r(talk.document), talk))
        for name, unseen in TOOLS.items():
            yield self._window(name, "tools", self._tools(Dice(self._r(name), held_out=unseen)))
        for name, make in RETRIEVALS.items():
            yield self._window(name, "retrieval", self._retrieval(self._r(name), make))

    def _r(self, document: str) -> Random:
        return stream(self.purpose, NAME, document)

    def _window(self, document: str, domain: str, parts: Iterator[Ids]) -> Window:
        """Cut where the window is full, in the middle of a turn."""
        ids: list[int] = []
        for part in parts:
            ids += part.tolist()
            if len(ids) >= WINDOW_TOKENS:
                break
        source = f"training.panel: stream {self.purpose}, {NAME}, {document}; emberbox, {OURS}"
        return Window(document, domain, source, _whole(ids, document))

    def _talk(self, r: Random, talk: Talk) -> Iterator[Ids]:
        effort = r.choice(talk.efforts)
        yield self._head(r, effort)
        recent: deque[str] = deque(maxlen=NO_REPEAT)
        while True:
            turns = r.choice(talk.exchanges)(_dice(r))
            if turns[-1].reply not in recent:
                recent.append(turns[-1].reply)
                yield from (self.encoder.turn(turn, effort)[0] for turn in turns)

    def _tools(self, dice: Dice) -> Iterator[Ids]:
        effort = dice.pick(EFFORTS)
        made = tool_use.tool_chat(dice, list(TOOL_EXCHANGES))
        yield self._head(dice.r, effort, made.tools)
        yield from (self.encoder.turn(turn, effort)[0] for turn in made.turns)

    def _retrieval(self, r: Random, make: Callable[[Dice, int], recall.Codes]) -> Iterator[Ids]:
        yield self._head(r, r.choice(EFFORTS))
        while True:
            dice = _dice(r)
            codes = make(dice, r.randint(4, 8))
            yield self.encoder.ids(USER + dice.say("document"))
            yield self.encoder.document(dice, self.fillers, codes, DOCUMENT_TOKENS)
            asked = [recall.ask_some(dice, codes.table) for _ in range(QUESTIONS)]
            for turn in (replace(asked[0], role=""), *asked[1:]):
                yield self.encoder.turn(turn, "Low")[0]

    def _head(self, r: Random, effort: str, tools: Sequence[object] = ()) -> Ids:
        system = r.choice(SYSTEMS) if r.random() < SYSTEM_SHARE else None
        return self.encoder.ids(head(effort, system, tools))


def _dice(r: Random) -> Dice:
    return Dice(r, held_out=r.random() < HELD_OUT)


# -- the files ------------------------------------------------------------------------------------


def panel(tokenizer: Tokenizer) -> dict[str, object]:
    """The whole panel as the file holds it."""
    windows = (*natural_windows(tokenizer), *Talks(tokenizer).windows())
    return {
        "schema": SCHEMA,
        "name": NAME,
        "about": ABOUT,
        "tokenizer_sha256": hashlib.sha256(TOKENIZER.read_bytes()).hexdigest(),
        "windows": [{"id": f"w{i:02d}", **asdict(each)} for i, each in enumerate(windows)],
    }


def short(document: Mapping[str, Any]) -> dict[str, object]:
    """`nano-short`, cut from the document of `nano-25`."""
    windows = [
        {**window, "token_ids": window["token_ids"][:SHORT_TOKENS]}
        for window in document["windows"]
        if window["document"] in SHORT
    ]
    return {**document, "name": SHORT_NAME, "about": SHORT_ABOUT, "windows": windows}


def canonical(document: dict[str, object]) -> bytes:
    """The bytes that a panel's hash is of."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def licences() -> str:
    """What the packages ask to be shown beside their text."""
    text = (TABLES / "LICENCES.md").read_text(encoding="utf-8")
    packages = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    names = {entry["package"] for entry in excerpts()}
    return LICENCES_HEAD + "".join(p for p in packages if p.split()[1] in names)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    whole = panel(Tokenizer.from_file(str(TOKENIZER)))
    PANELS.mkdir(exist_ok=True)
    LICENCES.write_text(licences(), encoding="utf-8")
    for file, document in ((FILE, whole), (SHORT_FILE, short(whole))):
        content = canonical(document)
        file.write_bytes(lzma.compress(content, preset=9))
        digest = hashlib.sha256(content).hexdigest()
        log.info("%s: %d bytes, sha256 %s", file.name, file.stat().st_size, digest)


if __name__ == "__main__":
    main()
