"""Training batches: rows of conversations, retrieval, text and pictures, from a seed each.

A row is one conversation of several turns, or text, padded. Weights are the shares of the loss:
answers and the marker after them count fully, prompts a little, padding is -1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.data import basics, pictures, recall, tool_use
from training.data.seeds import Purpose, stream
from training.data.text import TOKENIZER, Ids, Text, training_text
from training.data.turns import ASK, EFFORTS, SYSTEMS, USER, Dice, Turn, head
from training.recipe import Bucket
from training.shape import PAD_ID, TOKEN

Weights: TypeAlias = NDArray[np.float32]
Arrays: TypeAlias = tuple[NDArray[np.int16], NDArray[np.float16], NDArray[np.uint8] | None]

PROMPT_WEIGHT, LONG_PROMPT_WEIGHT, TEXT_WEIGHT = 0.1, 0.03, 0.6
LOOK_UP_WEIGHT = 2.0  # an answer that had to be looked up in a long text
PADDING_WEIGHT = -1.0
HARD_SHARE = 0.35  # of retrieval: near-duplicate names, updated codes
SINGLES: dict[Callable[[Dice], Turn], float] = {
    basics.count_json: 1.3, basics.count_aloud: 0.8, basics.sums: 2.6, basics.echo: 2.8,
    basics.fact: 1.6, basics.explain: 0.7, basics.code: 0.6, basics.chat: 0.9,
    basics.lists: 1.3,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mixture:
    """What rows are made of, by weight: up to 1,024 tokens `short`, above `long`.

    tools: exchanges with tools are drawn from these. lettered: of the codes in long texts.
    """

    short: Mapping[str, float]
    long: Mapping[str, float]
    tools: tuple[str, ...]
    lettered: float


WHOLE = Mixture(
    short={"chat": 4.0, "tools": 2.4, "retrieval": 2.2, "text": 3.4},
    long={"chat": 0.7, "tools": 0.3, "retrieval": 4.0, "text": 2.2},
    tools=("tool_call", "tool_call", "tool_parallel", "tool_none", "tool_none"),
    lettered=recall.LETTERED,
)
# What a whole run learns last: codes copied without a slip, tools that do not exist.
REPAIR = Mixture(
    short={"chat": 3.0, "tools": 3.0, "retrieval": 3.6, "text": 3.0},
    long={"chat": 0.3, "tools": 0.3, "retrieval": 5.0, "text": 2.2},
    tools=("tool_call", "tool_parallel", "tool_none", "tool_none", "tool_none"),
    lettered=0.5,
)


@dataclass(slots=True)
class Row:
    """A row being filled: token ids and weights, at most `length` of them."""

    length: int
    last: str = USER  # the marker that ends the row
    ids: list[Ids] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    used: int = 0

    @property
    def room(self) -> int:
        return self.length - self.used - 1

    def add(self, ids: Ids, weights: Weights) -> bool:
        """False, and nothing added, when it does not fit."""
        if len(ids) > self.room:
            return False
        self.ids.append(ids)
        self.weights.append(weights)
        self.used += len(ids)
        return True

    def finished(self) -> tuple[NDArray[np.int64], Weights]:
        """Closed by the next turn's marker and padded."""
        pad = self.length - self.used - 1
        end = np.array([TOKEN[self.last]] + pad * [PAD_ID])
        weights = np.array([1.0] + pad * [PADDING_WEIGHT], np.float32)
        ids = np.concatenate([*self.ids, end]).astype(np.int64)
        return ids, np.concatenate([*self.weights, weights])


class Encoder:
    """Turns and documents as token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def ids(self, text: str) -> Ids:
        """Special tokens in `text` are special: it is ours."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int16)

    def turn(self, turn: Turn, effort: str) -> tuple[Ids, Weights]:
        prompt, answer = self.ids(turn.prompt), self.ids(turn.answer(effort))
        return np.concatenate([prompt, answer]), weigh(len(prompt), len(answer))

    def document(self, dice: Dice, fillers: Sequence[Ids], codes: recall.Codes, length: int) -> Ids:
        """About `length` tokens of filler lines with the code lines at random depths."""
        lines = [[self.ids(line + "\n") for line in history] for history in codes.lines]
        count = sum(len(line) for history in lines for line in history)
        body: list[Ids] = []
        at = dice.r.randrange(len(fillers))
        while count < length:
            body.append(fillers[at])
            count += len(fillers[at])
            at = (at + 1) % len(fillers)
        places = [
            (place, i, j)
            for i, history in enumerate(lines)
            for j, place in enumerate(sorted(dice.r.random() for _ in history))
        ]
        return _interleaved(body, [(place, lines[i][j]) for place, i, j in sorted(places)])


def _interleaved(body: list[Ids], placed: list[tuple[float, Ids]]) -> Ids:
    """`placed` lines, in their order, at shares 0..1 of the way through `body`."""
    parts: list[Ids] = []
    done = 0
    for place, line in placed:
        upto = int(place * (len(body) + 1))
        parts += [*body[done:upto], line]
        done = max(done, upto)
    parts += body[done:]
    return np.concatenate(parts)


def weigh(
    prompt: int, answer: int, prompt_weight: float = PROMPT_WEIGHT, answer_weight: float = 1.0
) -> Weights:
    weights = np.full(prompt + answer, prompt_weight, dtype=np.float32)
    weights[0] = 1.0  # the marker that ends the reply before it
    weights[prompt:] = answer_weight
    return weights


class RowMaker:
    """Rows of one stream of chance."""

    def __init__(self, encoder: Encoder, text: Text, dice: Dice, mixture: Mixture = WHOLE) -> None:
        self.encoder, self.text, self.dice, self.r = encoder, text, dice, dice.r
        self.mixture = mixture

    def row(self, length: int) -> tuple[NDArray[np.int64], Weights]:
        mix = self.mixture.short if length <= 1024 else self.mixture.long
        kind = self.r.choices(list(mix), list(mix.values()))[0]
        if kind == "text":
            return self._text_row(length)
        row, effort = Row(length), self.dice.pick(EFFORTS)
        system = self.dice.pick(SYSTEMS) if self.dice.chance(0.25) else None
        if kind == "tools":
            self._add_tools(row, effort, system)
        else:
            self._add_head(row, head(effort, system))
        if kind == "retrieval":
            self._add_documents(row)
        elif kind == "chat" or self.dice.chance(0.7):
            self._add_singles(row, effort)
        return row.finished()

    def picture_row(
        self, length: int, size: tuple[int, int]
    ) -> tuple[NDArray[np.int64], Weights, NDArray[np.uint8]]:
        scene, row, effort = pictures.scene(self.dice, size), Row(length), self.dice.pick(EFFORTS)
        system = self.dice.pick(SYSTEMS) if self.dice.chance(0.2) else None
        self._add_head(row, head(effort, system), weight=0.0)
        for turn in scene.turns:
            if not row.add(*self.encoder.turn(turn, effort)):
                break
        return *row.finished(), scene.pixels

    def _text_row(self, length: int) -> tuple[NDArray[np.int64], Weights]:
        source = self.text.kinds["prose" if self.dice.chance(0.6) else "code"]
        start = self.r.randrange(len(source) - length)
        ids = source[start : start + length].astype(np.int64)
        weights = np.full(length, TEXT_WEIGHT, np.float32)
        if self.dice.chance(0.5):
            ids = np.concatenate([[TOKEN["[gMASK]"], TOKEN["<sop>"]], ids[:-2]])
            weights[:2] = 0.0
        return ids, weights

    def _add_head(self, row: Row, text: str, weight: float = LONG_PROMPT_WEIGHT) -> bool:
        ids = self.encoder.ids(text)
        weights = np.full(len(ids), weight, np.float32)
        weights[0] = 0.0
        return row.add(ids, weights)

    def _add_tools(self, row: Row, effort: str, system: str | None) -> None:
        """One to three exchanges with tools; fewer where the row is too short for them."""
        most = 1 if row.length < 512 else 3
        picked = [self.dice.pick(self.mixture.tools) for _ in range(self.r.randint(1, most))]
        made = tool_use.tool_chat(self.dice, picked, 2 if row.length < 512 else 4)
        if not self._add_head(row, head(effort, system, made.tools)):
            self._add_head(row, head(effort, system))
            self._add_singles(row, effort)
            return
        for turn in made.turns:
            if not row.add(*self.encoder.turn(turn, effort)):
                break
            row.last = turn.stop

    def _add_documents(self, row: Row) -> None:
        first = True
        while first or (row.room > 150 and self.dice.chance(0.93)):
            room = row.room - 8
            self._add_document(row, min(room, self.dice.pick([200, 400, room, room, room])))
            first = False

    def _add_document(self, row: Row, room: int) -> None:
        hard = self.dice.chance(HARD_SHARE)
        make = recall.hard_codes if hard else recall.plain_codes
        codes = make(self.dice, self.r.randint(1, 8), self.mixture.lettered)
        length = self.r.randint(30, max(40, room - 150))
        document = self.encoder.document(self.dice, self.text.fillers, codes, length)
        turn = recall.ask_some(self.dice, codes.table)
        lead = self.encoder.ids(USER + self.dice.say("document"))
        prompt = np.concatenate([lead, document, self.encoder.ids(turn.user + ASK)])
        answer = self.encoder.ids(turn.answer("Low"))
        weights = weigh(len(prompt), len(answer), LONG_PROMPT_WEIGHT, LOOK_UP_WEIGHT)
        if not row.add(np.concatenate([prompt, answer]), weights):
            return
        for _ in range(self.r.randint(0, 3)):
            row.add(*self.encoder.turn(recall.ask_some(self.dice, codes.table), "Low"))

    def _add_singles(self, row: Row, effort: str) -> None:
        """Unrelated turns until the row is full."""
        failures = 0
        while row.room > 23 and failures < 2:
            dice = Dice(self.r, room=row.room)
            if self.dice.chance(0.07):
                turns = self._memory_turns(dice)
            else:
                turns = [self.r.choices(list(SINGLES), list(SINGLES.values()))[0](dice)]
            added = all(row.add(*self.encoder.turn(turn, effort)) for turn in turns)
            failures += not added
            if added:
                row.last = USER

    def _memory_turns(self, dice: Dice) -> list[Turn]:
        told, asked = recall.memory(dice)
        between = [basics.fact(dice) for _ in range(self.r.randint(0, 2))]
        return [*told, *between, asked]


class Maker:
    """Batches of rows for the training loop."""

    def __init__(self, tokenizer: Tokenizer, text: Text, mixture: Mixture = WHOLE) -> None:
        self.encoder, self.text, self.mixture = Encoder(tokenizer), text, mixture

    def batch(self, seed: int, bucket: Bucket) -> Arrays:
        """ids int16 [rows, length], weights float16 alike, pixels uint8 [rows, 2, h, w, 3]."""
        dice = Dice(stream(Purpose.TRAINING, seed))
        rows = RowMaker(self.encoder, self.text, dice, self.mixture)
        if bucket.image is None:
            made = [rows.row(bucket.length) for _ in range(bucket.num_rows)]
            return _stacked([ids for ids, _ in made], [weights for _, weights in made], None)
        size = bucket.image
        shown = [rows.picture_row(bucket.length, size) for _ in range(bucket.num_rows)]
        pixels = np.stack([each for _, _, each in shown])
        return _stacked([ids for ids, _, _ in shown], [w for _, w, _ in shown], pixels)


def _stacked(
    ids: list[NDArray[np.int64]], weights: list[Weights], pixels: NDArray[np.uint8] | None
) -> Arrays:
    return np.stack(ids).astype(np.int16), np.stack(weights).astype(np.float16), pixels


def batch_maker(mixture: Mixture = WHOLE) -> Callable[[int, Bucket], Arrays]:
    """`(seed, bucket) -> arrays` over the corpus and the shipped tokenizer."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    return Maker(tokenizer, training_text(tokenizer), mixture).batch
