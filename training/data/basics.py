"""Turns that need no context: counting, sums, echoes, facts, lists, small talk."""

import json
from collections.abc import Callable

from training.data.tables import facts, small_talk, words
from training.data.turns import Dice, Turn, to_json

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
SYMBOLS = ("->", "{}", "[1, 2]", "&&", "#!", "(x)", "a=b;", "...", "!?", "<b>", "\\n", "//")
MORE_SYMBOLS = ('"q"', "~/.rc", "50%", "$5")
ROUND_ENDS = (10, 12, 15, 20, 25, 30, 40, 50, 60, 70, 80, 99)


def count_json(dice: Dice) -> Turn:
    r = dice.r
    last = r.choice(ROUND_ENDS) if dice.chance(0.5) else r.randint(3, 99)
    last = min(last, max(5, dice.room // 4))
    first = 1 if dice.chance(0.75) else r.randint(1, last)
    numbers = {"numbers": list(range(first, last + 1))}
    question = dice.ask("count_json", a=first, b=last)
    return Turn("count_json", question, json.dumps(numbers, separators=(",", ":")))


def count_aloud(dice: Dice) -> Turn:
    r = dice.r
    last = r.randint(3, max(4, min(60, dice.room // 5)))
    first = 1 if dice.chance(0.7) else r.randint(1, last)
    numbers = [str(i) for i in range(first, last + 1)]
    down = dice.chance(0.25)
    question = dice.ask("count_down" if down else "count_up", a=first, b=last)
    return Turn("count_aloud", question, ", ".join(numbers[::-1] if down else numbers))


# -- sums, with the steps a person would say --------------------------------------------------


def sums(dice: Dice) -> Turn:
    r = dice.r
    kind = r.choices("+-*", [0.45, 0.3, 0.25])[0]
    digits = r.choice([1, 2, 2, 3])
    if kind == "*":
        a, b = r.randint(2, 99 if dice.chance(0.6) else 9), r.randint(2, 9)
    elif kind == "+":
        fewer = r.choice([digits, max(1, digits - 1)])
        a, b = r.randint(1, 10**digits - 1), r.randint(1, 10**fewer - 1)
    else:
        b, a = sorted(r.randint(1, 10**digits - 1) for _ in range(2))
    think, result = {"+": _add, "-": _subtract, "*": _multiply}[kind](a, b)
    if kind != "*" and dice.chance(0.15):
        who, things = r.choice(words().names), r.choice(words().things)
        intent = "story_plus" if kind == "+" else "story_minus"
        question = dice.ask(intent, a=a, b=b, who=who, things=things)
    else:
        name = {"+": "plus", "-": "minus", "*": "times"}[kind]
        question = dice.ask("sum", a=a, b=b, o=kind, n=name)
    return Turn("sums", question, str(result), think)


def _add(a: int, b: int) -> tuple[str, int]:
    steps, carry, x, y = [], 0, a, b
    while x or y or carry:
        p, q = x % 10, y % 10
        total = p + q + carry
        if x or y:
            steps.append(f"{p}+{q}" + (f"+{carry}" if carry else "") + f"={total}")
        else:
            steps.append(f"carry {carry}")
        carry, x, y = total // 10, x // 10, y // 10
    return "; ".join(steps) + f". So {a + b}.", a + b


def _subtract(a: int, b: int) -> tuple[str, int]:
    steps, borrow, x, y = [], 0, a, b
    while x or y:
        p, q = x % 10, y % 10 + borrow
        borrow = int(p < q)
        steps.append(f"{p + 10 * borrow}-{q}={p + 10 * borrow - q}")
        x, y = x // 10, y // 10
    return "; ".join(steps) + f". So {a - b}.", a - b


def _multiply(a: int, b: int) -> tuple[str, int]:
    tens, ones = a // 10 * 10, a % 10
    if not tens:
        return f"{a}*{b}={a * b}. So {a * b}.", a * b
    steps = f"{tens}*{b}={tens * b}; {ones}*{b}={ones * b}; {tens * b}+{ones * b}={a * b}."
    return f"{steps} So {a * b}.", a * b


# -- echo -------------------------------------------------------------------------------------


def _run(dice: Dice, letters: str, most: int) -> str:
    return "".join(dice.pick(letters) for _ in range(dice.r.randint(1, most)))


def _pieces() -> dict[Callable[[Dice], str], float]:
    """What an echo is made of, and how often: half of it outside ASCII."""
    w = words()
    return {
        lambda d: d.pick(w.words): 0.24,
        lambda d: _run(d, w.han, 6): 0.14,
        lambda d: _run(d, w.hangul, 5): 0.12,
        lambda d: d.pick(w.arabic): 0.1,
        lambda d: d.pick(w.emoji): 0.08,
        lambda d: d.pick(w.latin + w.other): 0.07,
        lambda d: str(d.r.randint(0, 10 ** d.r.randint(1, 6))): 0.09,
        lambda d: d.pick(LETTERS) + _run(d, LETTERS, 7): 0.09,
        lambda d: d.pick(SYMBOLS + MORE_SYMBOLS): 0.07,
    }


def noise(dice: Dice, count: int) -> str:
    """`count` pieces of words, scripts, numbers and symbols."""
    pieces = _pieces()
    makers = dice.r.choices(list(pieces), list(pieces.values()), k=count)
    return dice.pick((" ", " ", " ", ", ")).join(make(dice) for make in makers)


def echo(dice: Dice) -> Turn:
    text = noise(dice, dice.r.randint(1, max(2, min(24, dice.room // 14))))
    question = dice.dress(dice.say("echo", text=text), suffix=False)  # a suffix would belong to it
    return Turn("echo", question, text)


# -- by heart ---------------------------------------------------------------------------------


def fact(dice: Dice) -> Turn:
    kind = dice.r.choices(["capital", "symbol", "opposite", "question"], [0.5, 0.17, 0.11, 0.22])[0]
    known = facts()
    if kind == "question":
        x, reply = dice.pick(tuple(known.questions.items()))
        return Turn("facts", dice.say("question", x=x, X=x[0].upper() + x[1:]), reply)
    table = {"capital": known.capitals, "symbol": known.elements, "opposite": known.opposites}[kind]
    x, answer = dice.pick(tuple(table.items()))
    if kind == "opposite" and dice.chance(0.5):
        x, answer = answer, x
    return Turn("facts", dice.ask(kind, x=x), f"The {kind} of {x} is {answer}.")


def explain(dice: Dice) -> Turn:
    x, reply = dice.pick(tuple(facts().explain.items()))
    return Turn("explain", dice.ask("explain", x=x), reply)


def code(dice: Dice) -> Turn:
    x, reply = dice.pick(tuple(facts().code.items()))
    return Turn("code", dice.ask("code", x=x), f"```python\n{reply}\n```")


def chat(dice: Dice) -> Turn:
    talk = dice.pick(small_talk())
    return Turn("chat", dice.fill(talk.wordings), talk.reply)


# -- lists ------------------------------------------------------------------------------------


def lists(dice: Dice) -> Turn:
    r, w = dice.r, words()
    kind = r.choice(["sort", "reverse", "json_array", "person_json"])
    count = r.randint(2, 8)
    if kind == "person_json":
        name, age = r.choice(w.names), r.randint(5, 90)
        city = r.choice(tuple(facts().capitals.values()))
        reply = to_json({"name": name, "age": age, "city": city})
        return Turn("lists", dice.say(kind, n=name, a=age, c=city), reply)
    if kind == "sort":
        numbers = [r.randint(0, 99) for _ in range(count)]
        items, reply = ", ".join(map(str, numbers)), ", ".join(map(str, sorted(numbers)))
    else:
        picked = r.sample(w.words, count)
        items = ", ".join(picked)
        reply = to_json(picked) if kind == "json_array" else ", ".join(picked[::-1])
    return Turn("lists", dice.dress(dice.say(kind, items=items), suffix=False), reply)
