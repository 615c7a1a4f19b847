"""How fast an engine decodes, through its public step loop: what is timed, and in which order.

One sequence at each length; at the first of them also with drafts, 2, 4 and 8 tokens to verify in a
step; then several requests at once. Weights may be of any kind: what is said is not looked at.
Knows no receipt.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from emberbox.engine.core import Engine
from emberbox.engine.plan import MAX_DRAFTS
from emberbox.errors import MeasureError, SettingsError
from emberbox.measure.speed_runs import Stopwatch, room_of

FILLS = ("prefill", "random")
# Of the engine's own prefill, whatever the fill: it takes seconds, and is what users have.
MAX_PREFILLED = 2048
_MOST = 1 << 62  # a larger number no receipt holds


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions:
    """What to time. Raises SettingsError.

    contexts: tokens that a sequence has when its last timed step ends, at most. tokens: timed
    steps, each after `warm_up` others. step_tokens: tokens verified in a step, 1 among them.
    concurrency: requests at once, of `prompt_tokens` each with replies of `reply_tokens`.
    fill: how a sequence comes to its length: "prefill" computes it, "random" fills the cache with
    random rows where it is longer than 2,048 tokens. seed: of prompts, drafts and such rows.
    """

    contexts: tuple[int, ...] = (1024,)
    tokens: int = 128
    warm_up: int = 8
    step_tokens: tuple[int, ...] = (1, 2, 4, 8)
    concurrency: tuple[int, ...] = (4, 8)
    prompt_tokens: int = 128
    reply_tokens: int = 400
    fill: str = "prefill"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fill not in FILLS:
            raise SettingsError(f"fill: {self.fill!r}", hint=" or ".join(FILLS))
        for name, least in (
            ("tokens", 2),  # of one step there are no percentiles
            ("warm_up", 0),
            ("prompt_tokens", 1),
            ("reply_tokens", 2),
            ("seed", 0),
        ):
            if not least <= (number := getattr(self, name)) <= _MOST:
                raise SettingsError(f"{name}: {number}", hint=f"from {least} to {_MOST}")
        for name, most, is_enough, those in (
            ("contexts", _MOST, bool(self.contexts), "one at least"),
            ("step_tokens", 1 + MAX_DRAFTS, 1 in self.step_tokens, "1 among them"),
            ("concurrency", _MOST, True, "or none"),
        ):
            numbers = getattr(self, name)
            is_once = len(set(numbers)) == len(numbers)
            if not (is_enough and is_once and all(1 <= each <= most for each in numbers)):
                hint = f"different numbers from 1 to {most}, {those}"
                raise SettingsError(f"{name}: {list(numbers)}", hint=hint)

    def as_json(self) -> dict[str, object]:
        """As a receipt says it."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One timed stretch, raw. kind: "decode", of one sequence, or "replies", of several.

    context: tokens of the sequence at the end of a decode run, the prompt's of replies.
    step_tokens: verified in each step. num_requests: at once. num_tokens: that came while it was
    timed. step_ms: of every step. wall_ms: from its beginning, with replies the first submission,
    to its last token. is_filled: the cache held random rows.
    """

    kind: str
    context: int
    step_tokens: int
    num_requests: int
    num_tokens: int
    wall_ms: float
    step_ms: tuple[float, ...]
    is_filled: bool = False


class Shape(NamedTuple):
    """What a run is to be before it is timed; each is what `Run` says of it."""

    kind: str
    context: int
    step_tokens: int
    num_requests: int
    is_filled: bool

    def __str__(self) -> str:
        kind, context, m, count, is_filled = self
        return f"{kind}, {context:,} tokens, {m} a step, {count} at once{', filled' * is_filled}"


Moved = Callable[[str, int, int], None]


def measure_speed(
    engine: Engine,
    options: SpeedOptions,
    moved: Moved = lambda *_: None,
    after_run: Callable[[], None] = lambda: None,
) -> list[Run]:
    """Every run of `options` with an idle engine, which is idle again when this returns.

    moved(stage, done, total): how far it is. after_run is called after each run. Raises
    MeasureError when the engine has less room than the options ask for, or is not idle, and what
    ended a request.
    """
    _require(engine, options)
    shapes = shapes_of(options)
    runs: list[Run] = []
    watch = Stopwatch(engine, options.seed)
    for number, shape in enumerate(shapes):
        moved(str(shape), number, len(shapes))
        runs.append(_run(watch, options, shape))
        after_run()
    moved("done", len(shapes), len(shapes))
    return runs


def shapes_of(options: SpeedOptions) -> list[Shape]:
    """Of every run, in order."""
    decodes = [
        Shape("decode", context, m, 1, options.fill == "random" and context > MAX_PREFILLED)
        for number, context in enumerate(options.contexts)
        for m in (options.step_tokens if number == 0 else (1,))
    ]
    return decodes + [
        Shape("replies", options.prompt_tokens, 1, n, False) for n in options.concurrency
    ]


def _run(watch: Stopwatch, options: SpeedOptions, shape: Shape) -> Run:
    kind, context, m, count, is_filled = shape
    if kind == "decode":
        steps = (options.warm_up, options.tokens)
        timed = watch.decode(context, steps, step_tokens=m, is_filled=is_filled)
    else:
        if options.warm_up:
            watch.replies(count, context, 1 + min(options.warm_up, 8))
        timed = watch.replies(count, context, options.reply_tokens)
    return Run(**shape._asdict(), **asdict(timed))


def _require(engine: Engine, options: SpeedOptions) -> None:
    """Raises MeasureError for an engine that cannot do what is asked."""
    memory, longest = engine.memory, max(options.contexts)
    if engine.has_work:
        raise MeasureError("speed: the engine has other work", hint="measure an idle one")
    if longest > memory.max_model_len:
        raise MeasureError(
            f"speed: a context of {longest} tokens, the engine holds {memory.max_model_len}",
            hint="raise --max-model-len, or lower --context",
        )
    room = room_of(options.warm_up + options.tokens, max(options.step_tokens))
    if min(options.contexts) <= room:
        raise MeasureError(
            f"speed: a context of {min(options.contexts)} tokens has no room for a prompt: "
            f"the timed steps take {room}",
            hint="raise --context, or lower --tokens",
        )
    most = max(options.concurrency, default=1)
    if most > memory.num_slots:
        raise MeasureError(
            f"speed: {most} requests at once, the engine computes {memory.num_slots}",
            hint="raise --max-running",
        )
    each = options.prompt_tokens + options.reply_tokens
    if options.concurrency and each > memory.max_model_len:
        raise MeasureError(
            f"speed: prompt and reply have {each} tokens, the engine holds {memory.max_model_len}",
            hint="raise --max-model-len, or lower --reply-tokens",
        )
