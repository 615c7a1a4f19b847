"""One turn of a conversation, the text around it, and the dice that make it.

Answers are functions of the prompt, so greedy decoding is right exactly when every answer token is
the argmax. The text is what the chat template renders (tests/training/test_data.py).
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from training.data.tables import Wordings, wordings

T = TypeVar("T")

EFFORTS = ("Max", "High", "Low")  # Low answers without a thought
USER, OBSERVATION = "<|user|>", "<|observation|>"
ASK = "<|assistant|><think>"
TOOLS_TEXT = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    "{}\n</tools>\n\nFor each function call, output the function name and arguments within "
    "the following XML format:\n<tool_call>{{function-name}}<arg_key>{{arg-key-1}}</arg_key>"
    "<arg_value>{{arg-value-1}}</arg_value>...</tool_call>"
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are ember-nano.",
    "Answer briefly.",
    "Be concise and exact.",
    "You are a careful assistant. Follow the format that is asked for.",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What comes in (`role`, `user`) and what must come out; `stop` is the marker after it."""

    skill: str
    user: str
    reply: str
    think: str = ""
    role: str = USER
    stop: str = USER

    @property
    def prompt(self) -> str:
        return self.role + self.user + ASK

    def answer(self, effort: str) -> str:
        """The generated text without the stop marker: thought, its end, reply."""
        return ("" if effort == "Low" else self.think) + "</think>" + self.reply

    def after(self, text: str) -> "Turn":
        """The same turn with `text` (a placeholder, a document) before the user's words."""
        return replace(self, user=text + self.user)


def head(
    effort: str = "Max", system: str | None = None, tools: Sequence[object] | None = None
) -> str:
    """The beginning of every prompt."""
    text = f"[gMASK]<sop><|system|>Reasoning Effort: {effort}"
    if tools:
        text += "<|system|>" + TOOLS_TEXT.format("\n".join(map(to_json, tools)))
    if system:
        text += "<|system|>" + system
    return text


def to_json(value: object) -> str:
    """As the template writes JSON."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Dice:
    """Chance, and which wordings it may use. `room`: about how many tokens the turn may take."""

    r: random.Random
    held_out: bool = False
    room: int = 400

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def pick(self, items: Sequence[T]) -> T:
        return self.r.choice(items)

    def say(self, intent: str, **values: object) -> str:
        """One wording of an intent, filled."""
        return self.fill(wordings()[intent], **values)

    def fill(self, ways: Wordings, **values: object) -> str:
        pattern = self.pick(ways.held_out if self.held_out else ways.seen)
        return re.sub(r"\{(\w+)\}", lambda found: str(values[found[1]]), pattern)

    def dress(self, text: str, *, suffix: bool = True) -> str:
        """Now and then a few words before or after a request."""
        if self.chance(0.15):
            text = self.say("prefix") + text
        if suffix and self.chance(0.08):
            text += self.say("suffix")
        return text

    def ask(self, intent: str, **values: object) -> str:
        """`say`, dressed."""
        return self.dress(self.say(intent, **values))
