"""Tools in the head, and turns that call them, answer from them, or find none that fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from training.data.basics import noise
from training.data.tables import facts, words
from training.data.turns import OBSERVATION, Dice, Turn, to_json

SKY = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
VERBS = (
    "move", "open", "close", "start", "stop", "find", "create", "delete", "update", "read",
    "write", "rename", "check", "scan", "load",
)  # fmt: skip
PROPERTIES = {
    "count": "integer", "owner": "string", "level": "integer", "active": "boolean",
    "mode": "string", "target": "string", "speed": "number", "path": "string", "tags": "array",
}  # fmt: skip
NO_TOOL = "None of my tools can do that."
MADE_UP_MISFIT = 0.65  # of the requests that no tool fits; the others ask for a known tool
MADE_UP_EXTRA = 0.6  # of the tools that nobody asks for
NEAR = 0.75  # of both, where a made-up tool is offered: named as it but for the verb or the noun
Schema = dict[str, object]


def _shown(value: object) -> str:
    """A string raw, anything else as JSON: types are known from the schema alone."""
    return value if isinstance(value, str) else to_json(value)


@dataclass(frozen=True, slots=True)
class Use:
    """One request, the call it needs, what comes back and what is said then."""

    schema: Schema
    request: str
    arguments: Mapping[str, object]
    result: Mapping[str, object]
    reply: str

    @property
    def name(self) -> str:
        return str(self.schema["name"])

    @property
    def call(self) -> str:
        text = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{_shown(value)}</arg_value>"
            for key, value in self.arguments.items()
        )
        return f"<tool_call>{self.name}{text}</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolChat:
    """Tools for the head and the turns that go with them."""

    tools: tuple[Schema, ...]
    turns: tuple[Turn, ...]


def _schema(name: str, description: str, **properties: str) -> Schema:
    shape = {
        "type": "object",
        "properties": {k: {"type": kind} for k, kind in properties.items()},
        "required": list(properties),
    }
    return {"name": name, "description": description, "parameters": shape}


def _weather(dice: Dice) -> Use:
    city = dice.pick(tuple(facts().capitals.values()))
    degrees, sky = dice.r.randint(-9, 39), dice.pick(SKY)
    return Use(
        _schema("get_weather", "Get the weather of a city", city="string"),
        dice.say("get_weather", city=city),
        {"city": city},
        {"temperature": degrees, "sky": sky},
        f"The weather in {city} is {sky} with {degrees} degrees.",
    )


def _timer(dice: Dice) -> Use:
    minutes, label = dice.r.randint(1, 99), dice.pick(words().words)
    return Use(
        _schema("set_timer", "Set a timer", minutes="integer", label="string"),
        dice.say("set_timer", minutes=minutes, label=label),
        {"minutes": minutes, "label": label},
        {"ok": True},
        f"The timer {label} is set for {minutes} minutes.",
    )


def _mail(dice: Dice) -> Use:
    to, subject = (
        dice.pick(words().names),
        " ".join(dice.r.sample(words().words, dice.r.randint(1, 4))),
    )
    return Use(
        _schema("send_mail", "Send a mail", to="string", subject="string"),
        dice.say("send_mail", to=to, subject=subject),
        {"to": to, "subject": subject},
        {"ok": True},
        f"The mail to {to} is sent.",
    )


def _stock(dice: Dice) -> Use:
    item, count = dice.pick(words().words), dice.r.randint(0, 500)
    return Use(
        _schema("get_stock", "Number of items in stock", item="string"),
        dice.say("get_stock", item=item),
        {"item": item},
        {"count": count},
        f"There are {count} {item} in stock.",
    )


def _price(dice: Dice) -> Use:
    product, price = dice.pick(words().words), dice.r.randint(1, 999)
    return Use(
        _schema("get_price", "Price of a product in euros", product="string"),
        dice.say("get_price", product=product),
        {"product": product},
        {"price": price},
        f"The price of {product} is {price} euros.",
    )


def _light(dice: Dice) -> Use:
    room, on = dice.pick(words().words), dice.chance(0.5)
    state = "on" if on else "off"
    return Use(
        _schema("set_light", "Switch a light", room="string", on="boolean"),
        dice.say(f"set_light_{state}", room=room),
        {"room": room, "on": on},
        {"ok": True},
        f"The light in the {room} room is {state}.",
    )


def _time(dice: Dice) -> Use:
    city = dice.pick(tuple(facts().capitals.values()))
    time = f"{dice.r.randint(0, 23):02d}:{dice.r.randint(0, 59):02d}"
    return Use(
        _schema("get_time", "Local time of a city", city="string"),
        dice.say("get_time", city=city),
        {"city": city},
        {"time": time},
        f"It is {time} in {city}.",
    )


def _value(dice: Dice, kind: str) -> object:
    if kind == "integer":
        return dice.r.randint(0, 999)
    if kind == "boolean":
        return dice.chance(0.5)
    if kind == "number":
        return dice.r.randint(1, 99) / 10
    if kind == "array":
        return dice.r.sample(words().words, 2)
    return dice.pick(words().words) if dice.chance(0.7) else noise(dice, 2)


def _made_up(dice: Dice) -> str:
    return f"{dice.pick(VERBS)}_{dice.pick(words().words)}"


def _near(dice: Dice, name: str) -> str:
    """The same verb with another noun, or the same noun with another verb."""
    verb, noun = name.split("_")
    other = _made_up(dice).split("_")
    return f"{verb}_{other[1]}" if dice.chance(0.5) else f"{other[0]}_{noun}"


def _free(dice: Dice) -> Use:
    """A tool of a made-up name."""
    return _tool_named(dice, _made_up(dice))


def _tool_named(dice: Dice, name: str) -> Use:
    """A tool with up to three arguments of any type."""
    kinds = dict(dice.r.sample(list(PROPERTIES.items()), dice.r.randint(1, 3)))
    arguments = {key: _value(dice, kind) for key, kind in kinds.items()}
    said = " and ".join(f"{key} {_shown(value)}" for key, value in arguments.items())
    result = dice.pick(words().words)
    return Use(
        _schema(name, name.replace("_", " ").capitalize(), **kinds),
        dice.say("call_free", name=name, args=said),
        arguments,
        {"result": result},
        f"The result is {result}.",
    )


Maker = Callable[[Dice], Use]
QUERIES: tuple[Maker, ...] = (_weather, _time, _stock, _price)  # may be asked twice at once
KNOWN: tuple[Maker, ...] = (*QUERIES, _timer, _mail, _light)
MAKERS: tuple[Maker, ...] = (*KNOWN, _free, _free, _free, _free)


def call_turns(uses: list[Use], request: str) -> list[Turn]:
    """The call, or parallel calls, and the answer from the results."""
    skill = "tool_call" if len(uses) == 1 else "tool_parallel"
    calls = "".join(use.call for use in uses)
    results = "".join(f"<tool_response>{to_json(dict(use.result))}</tool_response>" for use in uses)
    reply = " ".join(use.reply for use in uses)
    return [
        Turn(skill, request, calls, stop=OBSERVATION),
        Turn("tool_answer", results, reply, role=OBSERVATION),
    ]


def single(dice: Dice) -> list[Use]:
    return [dice.pick(MAKERS)(dice)]


def parallel(dice: Dice) -> list[Use]:
    """Two calls in one reply, of two tools or twice the same."""
    if dice.chance(0.3):
        maker = dice.pick(QUERIES)
        return [maker(dice), maker(dice)]
    first, second = dice.r.sample(KNOWN, 2)
    if dice.chance(0.5):
        second = _free
    uses = [first(dice), second(dice)]
    dice.r.shuffle(uses)
    return uses


def request_of(dice: Dice, uses: list[Use]) -> str:
    if len(uses) == 1:
        return uses[0].request
    return dice.say("two", a=uses[0].request, b=uses[1].request)


def misfit(dice: Dice, offered: Mapping[str, Schema]) -> Turn:
    """A request for a tool that is not among the offered ones: most often one of a made-up name."""
    while True:
        use = _other(dice, offered, MADE_UP_MISFIT)
        if use.name not in offered:
            return Turn("tool_none", use.request, NO_TOOL)


def _other(dice: Dice, offered: Mapping[str, Schema], made_up_share: float) -> Use:
    """A known tool, or a made-up one: near to one of those that are offered where there is one."""
    if not dice.chance(made_up_share):
        return dice.pick(KNOWN)(dice)
    made_up = [name for name in offered if name.split("_")[0] in VERBS]
    if made_up and dice.chance(NEAR):
        return _tool_named(dice, _near(dice, dice.pick(made_up)))
    return _free(dice)


def tool_chat(dice: Dice, kinds: list[str], most: int = 4) -> ToolChat:
    """One exchange per kind (`tool_call`, `tool_parallel`, `tool_none`), extra tools beside.

    At most `most` tools, unless the exchanges need more; names near to each other among them.
    """
    offered: dict[str, Schema] = {}
    exchanges: list[list[Use]] = []
    for kind in kinds:
        uses = {"tool_call": single, "tool_parallel": parallel}.get(kind, lambda _: [])(dice)
        offered |= {use.name: use.schema for use in uses}
        exchanges.append(uses)
    wanted = len(offered) + dice.pick((0, 0, 1, 2, 3)) if offered else dice.r.randint(1, most)
    while len(offered) < min(wanted, most):
        extra = _other(dice, offered, MADE_UP_EXTRA)
        offered.setdefault(extra.name, extra.schema)
    turns: list[Turn] = []
    for uses in exchanges:
        if uses:
            turns += call_turns(uses, request_of(dice, uses))
        else:
            turns.append(misfit(dice, offered))
    tools = list(offered.values())
    dice.r.shuffle(tools)
    return ToolChat(tuple(tools), tuple(turns))
