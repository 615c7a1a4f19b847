"""Evaluation items: prompt, the one right answer, and whether its wording was ever trained on.

Item i of a skill depends on the purpose, the skill, the length and i alone. Long texts are made of
lines of held-out packages.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.data import basics, pictures, recall, tool_use
from training.data.maker import Encoder
from training.data.seeds import Purpose, stream
from training.data.text import Ids, Text
from training.data.turns import EFFORTS, USER, Dice, Turn, head
from training.shape import TOKEN

HELD_OUT_OF_TEN = 4  # items 0..3 of every ten use wordings that training never saw
NUM_CODES, NUM_ASKED = 6, 2
NARROW, WIDE = (112, 112), (168, 112)
OFF = "Off"  # thinking off: the prompt closes the thought itself
MODES = (*EFFORTS, OFF)
SINGLES: dict[str, Callable[[Dice], Turn]] = {
    "count_json": basics.count_json, "count_aloud": basics.count_aloud, "sums": basics.sums,
    "sums_direct": basics.sums, "echo": basics.echo, "facts": basics.fact,
    "explain": basics.explain, "code": basics.code, "chat": basics.chat, "lists": basics.lists,
}  # fmt: skip
MODES_OF = {"sums": ("Max", "High"), "sums_direct": ("Low", OFF)}


@dataclass(frozen=True, slots=True)
class Case:
    """`prompt` and `answer` (stop token included) as ids; pixels uint8 [2, h, w, 3] or None."""

    skill: str
    index: int
    mode: str
    held_out: bool
    prompt: NDArray[np.int64]
    answer: NDArray[np.int64]
    pixels: NDArray[np.uint8] | None = None

    @property
    def is_clip(self) -> bool:
        return TOKEN["<|begin_of_video|>"] in self.prompt

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


class CaseMaker:
    """`text` gives the lines of long texts; `training.data.text.held_out` for evaluation."""

    def __init__(
        self, tokenizer: Tokenizer, text: Text, purpose: Purpose = Purpose.EVALUATION
    ) -> None:
        self.encoder, self.text, self.purpose = Encoder(tokenizer), text, purpose

    def case(self, skill: str, index: int, length: int = 0) -> Case:
        """`length`: tokens of the text in retrieval; 1 asks for a wide picture."""
        unseen = index % 10 < HELD_OUT_OF_TEN
        r = stream(self.purpose, skill, length, index)
        dice = Dice(r, held_out=unseen)
        mode = dice.pick(MODES_OF.get(skill, MODES))
        effort = "Low" if mode == OFF else mode
        pixels = None
        if skill.startswith("retrieval"):
            before, turn = self._retrieval(dice, effort, hard=skill == "retrieval_hard", n=length)
        elif skill.startswith("tool"):
            before, turn = self._tools(dice, effort, skill)
        elif skill.startswith("vi"):
            scene = pictures.scene(dice, WIDE if length else NARROW, skill)
            turn, pixels = scene.turns[0], scene.pixels
            before = [self.encoder.ids(head(effort))]
        elif skill == "memory":
            before, turn = self._memory(dice, effort)
        else:
            before, turn = [self.encoder.ids(head(effort))], SINGLES[skill](dice)
        return self._finished(Case(skill, index, mode, unseen, *_EMPTY, pixels), before, turn)

    def _finished(self, case: Case, before: list[Ids], turn: Turn) -> Case:
        answer = turn.answer("Low" if case.mode == OFF else case.mode)
        prompt = turn.prompt
        if case.mode == OFF:
            answer, prompt = answer.removeprefix("</think>"), prompt + "</think>"
        ids = np.concatenate([*before, self.encoder.ids(prompt)]).astype(np.int64)
        right = np.append(self.encoder.ids(answer), TOKEN[turn.stop]).astype(np.int64)
        return replace(case, prompt=ids, answer=right)

    def _retrieval(self, dice: Dice, effort: str, *, hard: bool, n: int) -> tuple[list[Ids], Turn]:
        codes = (recall.hard_codes if hard else recall.plain_codes)(dice, NUM_CODES)
        document = self.encoder.document(dice, self.text.fillers, codes, n)
        turn = recall.ask_codes(dice, codes.table, dice.r.sample(list(codes.table), NUM_ASKED))
        lead = self.encoder.ids(head(effort) + USER + dice.say("document"))
        return [lead, document], Turn(turn.skill, turn.user, turn.reply, role="")

    def _tools(self, dice: Dice, effort: str, skill: str) -> tuple[list[Ids], Turn]:
        kind = skill
        if skill == "tool_answer":
            kind = dice.pick(("tool_call", "tool_parallel"))
        made = tool_use.tool_chat(dice, [kind])
        before = [self.encoder.ids(head(effort, None, made.tools))]
        if skill != "tool_answer":
            return before, made.turns[0]
        call, answer = made.turns
        return [*before, self.encoder.ids(call.prompt + call.answer(effort))], answer

    def _memory(self, dice: Dice, effort: str) -> tuple[list[Ids], Turn]:
        told, asked = recall.memory(dice)
        earlier = [*told, *(basics.fact(dice) for _ in range(dice.r.randint(0, 2)))]
        text = head(effort) + "".join(turn.prompt + turn.answer(effort) for turn in earlier)
        return [self.encoder.ids(text)], asked


_EMPTY = (np.zeros(0, np.int64), np.zeros(0, np.int64))
