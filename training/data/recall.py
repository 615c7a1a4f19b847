"""Turns about something said before: facts over turns, codes in a long text."""

from dataclasses import dataclass

from training.data.tables import facts, words
from training.data.turns import Dice, Turn, to_json

SECRET_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
LETTERED = 0.2  # of the codes; the others are numbers
ABOUT = {
    "name": "Your name is {}.",
    "city": "You live in {}.",
    "word": "Your favourite word is {}.",
}


def memory(dice: Dice) -> tuple[list[Turn], Turn]:
    """One or two things told, and a question about one of them."""
    kinds = dice.r.sample(list(ABOUT), dice.r.choice([1, 1, 2]))
    told = {kind: _about_me(dice, kind) for kind in kinds}
    turns = [Turn("told", dice.say(f"tell_{kind}", x=x), "Noted.") for kind, x in told.items()]
    kind = dice.pick(kinds)
    return turns, Turn("memory", dice.say(f"ask_{kind}"), ABOUT[kind].format(told[kind]))


def _about_me(dice: Dice, kind: str) -> str:
    if kind == "city":
        return dice.pick(tuple(facts().capitals.values()))
    return dice.pick(words().names if kind == "name" else words().words)


@dataclass(frozen=True, slots=True)
class Codes:
    """Lines in the order they must keep (a later one replaces an earlier one), and the truth."""

    lines: tuple[tuple[str, ...], ...]  # per name, oldest first
    table: dict[str, str]


def secret(dice: Dice, lettered: float = LETTERED) -> str:
    if dice.chance(1 - lettered):
        return str(dice.r.randint(1000, 10 ** dice.r.choice([4, 5, 6]) - 1))
    return "".join(dice.pick(SECRET_LETTERS) for _ in range(5))


def plain_codes(dice: Dice, count: int, lettered: float = LETTERED) -> Codes:
    """`count` names that share nothing, one code each."""
    table = {name: secret(dice, lettered) for name in dice.r.sample(words().words, count)}
    return Codes(tuple((dice.say("code_line", k=k, v=v),) for k, v in table.items()), table)


def hard_codes(dice: Dice, count: int, lettered: float = LETTERED) -> Codes:
    """Names that differ in one word of two; about a third of the codes change, some twice."""
    table: dict[str, str] = {}
    lines = []
    for name in _near_names(dice, count):
        history = [secret(dice, lettered) for _ in range(dice.r.choice([1, 1, 1, 1, 2, 3]))]
        first, *later = history
        updates = [dice.say("code_update", k=name, v=v) for v in later]
        lines.append((dice.say("code_line", k=name, v=first), *updates))
        table[name] = history[-1]
    return Codes(tuple(lines), table)


def _near_names(dice: Dice, count: int) -> list[str]:
    stems = dice.r.sample(words().words, -(-count // 3) + 1)
    names = [f"{stem} {place}" for stem in stems for place in dice.r.sample(words().places, 4)]
    near = [name for name in names if name.startswith((stems[0], stems[1]))][: max(count // 2, 2)]
    rest = [name for name in names if name not in near]
    return dice.r.sample(near + dice.r.sample(rest, count), count)


def ask_codes(dice: Dice, table: dict[str, str], asked: list[str]) -> Turn:
    """The codes of `asked` as JSON; null for a name that has none."""
    question = dice.say("ask_codes", k=", ".join(asked))
    return Turn("retrieval", question, to_json({name: table.get(name) for name in asked}))


def ask_some(dice: Dice, table: dict[str, str]) -> Turn:
    """One to four of the names, now and then one without a code, now and then not as JSON."""
    asked = dice.r.sample(list(table), min(dice.r.choice([1, 1, 2, 2, 3, 4]), len(table)))
    if dice.chance(0.08):
        unknown = [word for word in words().words if word not in table]
        asked[dice.r.randrange(len(asked))] = dice.pick(unknown)
    if len(asked) == 1 and dice.chance(0.4) and asked[0] in table:
        return Turn("retrieval", dice.say("ask_one_code", k=asked[0]), table[asked[0]])
    return ask_codes(dice, table, asked)
