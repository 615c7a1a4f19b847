"""Rewrite the conversations that `emberbox compress` calibrates with:

    python -m training.calibration

They are what ember-nano was trained for, of the purpose `calibration`, in OpenAI's shape; the long
texts around codes are lines of the prose that lies beside the file, and which is kept by hand.
Nothing that an evaluation asks is among them. The same tables give the same bytes everywhere.
"""

import argparse
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from training.data import basics, recall, tool_use
from training.data.cases import CaseMaker
from training.data.maker import HARD_SHARE, SINGLES
from training.data.seeds import Purpose, stream
from training.data.tables import small_talk, wordings
from training.data.text import TOKENIZER, Text, filler_lines
from training.data.turns import EFFORTS, OBSERVATION, SYSTEMS, USER, Dice, Turn, to_json
from training.skills import SKILLS

log = logging.getLogger("training.calibration")

FOLDER = Path(__file__).resolve().parents[1] / "src" / "emberbox" / "compress" / "calibration_text"
FILE = FOLDER / "conversations.jsonl"
FILLERS = ("general.txt", "guide.md", "source.txt")
MAX_BYTES = 140_000
KINDS = {"chat": 4.0, "tools": 2.4, "retrieval": 2.2}  # as training.data.maker.WHOLE
TOOL_KINDS = ("tool_call", "tool_call", "tool_parallel", "tool_none")
# What an evaluation asks is nowhere inside a request; what is shorter is only never a whole one.
MIN_INSIDE = 16
MIN_WORDS = 12  # of a held-out wording in one piece, likewise
REMEMBERED = ("told", "memory")  # turns that are nothing without each other


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in the generator's shape and what stands in the head before them."""

    turns: tuple[Turn, ...]
    effort: str
    system: str | None = None
    tools: tuple[tool_use.Schema, ...] = ()

    def as_json(self) -> dict[str, object]:
        """One line of the file, without its key order left to chance."""
        messages: list[object] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for turn in self.turns:
            messages += [*_asked(turn), self._reply(turn)]
        tools = [{"type": "function", "function": tool} for tool in self.tools]
        line: dict[str, object] = {"reasoning_effort": self.effort.lower()}
        return line | ({"tools": tools} if tools else {}) | {"messages": messages}

    def _reply(self, turn: Turn) -> dict[str, object]:
        reply: dict[str, object] = {"role": "assistant", "content": turn.reply}
        if turn.think and self.effort != "Low":
            reply["reasoning_content"] = turn.think
        if turn.stop == OBSERVATION:
            reply |= {"content": "", "tool_calls": self._calls(turn.reply)}
        return reply

    def _calls(self, reply: str) -> list[object]:
        kinds = {str(tool["name"]): tool["parameters"] for tool in self.tools}
        calls: list[object] = []
        for i, call in enumerate(re.findall("<tool_call>(.*?)</tool_call>", reply, re.DOTALL)):
            name, *parts = call.split("<arg_key>")
            pairs = [p.removesuffix("</arg_value>").split("</arg_key><arg_value>") for p in parts]
            text = ", ".join(f"{to_json(k)}: {_typed(kinds[name], k, v)}" for k, v in pairs)
            function = {"name": name, "arguments": f"{{{text}}}"}
            calls.append({"id": f"c{i}", "type": "function", "function": function})
        return calls


def _typed(schema: object, key: str, shown: str) -> str:
    """An argument as JSON: what the template shows of a string is the string itself."""
    assert isinstance(schema, Mapping)
    return to_json(shown) if schema["properties"][key]["type"] == "string" else shown


def _asked(turn: Turn) -> list[object]:
    if turn.role != OBSERVATION:
        return [{"role": "user", "content": turn.user}]
    results = re.findall("<tool_response>(.*?)</tool_response>", turn.user, re.DOTALL)
    return [{"role": "tool", "tool_call_id": f"c{i}", "content": r} for i, r in enumerate(results)]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What the evaluation says to the model, without documents and pictures.

    requests: those that are an item by themselves. talks: all that is said in one memory item.
    wordings: what training never says, other items' included.
    """

    requests: frozenset[str]
    talks: frozenset[tuple[str, ...]]
    wordings: tuple[str, ...]

    def holds(self, turns: Sequence[Turn]) -> bool:
        """Whether `turns` are an item, or a request among them is one or has one inside."""
        said = tuple(turn.user for turn in turns)
        if said in self.talks or any(
            _is_worded(text, way) for way in self.wordings for text in said
        ):
            return True
        alone = [turn.user for turn in turns if turn.role == USER and turn.skill not in REMEMBERED]
        return any(
            text == request or (len(request) >= MIN_INSIDE and request in text)
            for text in alone
            for request in self.requests
        )


@cache
def _pattern(wording: str) -> tuple[bool, re.Pattern[str]]:
    """Whether it has words enough to be known inside a text, and what it looks like."""
    parts = re.split(r"\{\w+\}", wording)
    return max(map(len, parts)) >= MIN_WORDS, re.compile(".{1,80}?".join(map(re.escape, parts)))


def _is_worded(text: str, wording: str) -> bool:
    inside, pattern = _pattern(wording)
    return bool(pattern.search(text) if inside else pattern.fullmatch(text))


@cache
def evaluated() -> Evaluated:
    """All items of the full table that show neither document nor picture."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    maker = CaseMaker(tokenizer, Text({}, ()))
    requests: set[str] = set()
    talks: set[tuple[str, ...]] = set()
    for skill in SKILLS:
        if skill.case.startswith(("retrieval", "vi")):
            continue
        for i in range(skill.items):
            prompt = maker.case(skill.case, i).prompt.tolist()
            text = tokenizer.decode(prompt, skip_special_tokens=False)
            said = tuple(part.partition("<|")[0] for part in text.split(USER)[1:])
            if skill.case == "memory":
                talks.add(said)
            else:
                requests.update(said)
    ways = [way for each in wordings().values() for way in each.held_out]
    ways += [way for talk in small_talk() for way in talk.wordings.held_out]
    return Evaluated(frozenset(requests), frozenset(talks), tuple(filter(None, ways)))


class Writer:
    """Conversations of one stream of chance."""

    def __init__(self, dice: Dice, lines: Sequence[str], avoid: Evaluated) -> None:
        self.dice, self.r, self.lines, self.avoid = dice, dice.r, lines, avoid

    def conversation(self) -> Conversation:
        kind = self.r.choices(list(KINDS), list(KINDS.values()))[0]
        effort = self.dice.pick(EFFORTS)
        system = self.dice.pick(SYSTEMS) if self.dice.chance(0.25) else None
        if kind == "tools":
            turns, tools = self._tools()
            return Conversation((*turns, *self._singles(1)), effort, system, tools)
        if kind == "retrieval":
            return Conversation(self._document(), "Low", system)
        return Conversation(self._singles(self.r.randint(3, 9)), effort, system)

    def _singles(self, count: int) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        while len(turns) < count:
            made = self._memory() if self.dice.chance(0.07) else [self._single()]
            if not self.avoid.holds(made):
                turns += made
        return tuple(turns)

    def _single(self) -> Turn:
        return self.r.choices(list(SINGLES), list(SINGLES.values()))[0](self.dice)

    def _memory(self) -> list[Turn]:
        told, asked = recall.memory(self.dice)
        return [*told, *(basics.fact(self.dice) for _ in range(self.r.randint(0, 2))), asked]

    def _tools(self) -> tuple[tuple[Turn, ...], tuple[tool_use.Schema, ...]]:
        while True:
            kinds = [self.dice.pick(TOOL_KINDS) for _ in range(self.r.randint(1, 3))]
            made = tool_use.tool_chat(self.dice, kinds)
            if not self.avoid.holds(made.turns):
                return made.turns, made.tools

    def _document(self) -> tuple[Turn, ...]:
        """A text with codes in it, and one to four questions."""
        hard = self.dice.chance(HARD_SHARE)
        make = recall.hard_codes if hard else recall.plain_codes
        codes = make(self.dice, self.r.randint(2, 8))
        text = self.dice.say("document") + "".join(self._mixed(codes))
        asked = [recall.ask_some(self.dice, codes.table) for _ in range(self.r.randint(1, 4))]
        return (asked[0].after(text), *asked[1:])

    def _mixed(self, codes: recall.Codes) -> Iterator[str]:
        """Filler lines with the lines of codes among them, those of one name in their order."""
        count = self.r.randint(4, 40)
        first = self.r.randrange(len(self.lines) - count)
        placed = [
            (place, line + "\n")
            for history in codes.lines
            for place, line in zip(sorted(self.r.random() for _ in history), history, strict=True)
        ]
        placed += [(i / count, line) for i, line in enumerate(self.lines[first : first + count])]
        return (line for _, line in sorted(placed))


def conversations(folder: Path = FOLDER) -> str:
    """The whole file."""
    lines = filler_lines([(folder / name).read_text(encoding="utf-8") for name in FILLERS])
    writer = Writer(Dice(stream(Purpose.CALIBRATION, "compress", 1)), lines, evaluated())
    out: list[str] = []
    size = 0
    while True:
        line = to_json(writer.conversation().as_json()) + "\n"
        size += len(line.encode())
        if size > MAX_BYTES:
            return "".join(out)
        out.append(line)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    text = conversations()
    FILE.write_text(text, encoding="utf-8")
    log.info("%s: %d conversations, %d bytes", FILE.name, text.count("\n"), len(text.encode()))


if __name__ == "__main__":
    main()
