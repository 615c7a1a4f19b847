"""`emberbox measure speed PATH --engine`: how fast the engine decodes, with a receipt."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from rich.console import Console

from emberbox.cli.flags import add_engine_flags, checkpoint_folder, settings_from
from emberbox.cli.stage_bar import StageBar
from emberbox.errors import CheckpointError, EmberboxError, SettingsError
from emberbox.settings import EngineSettings, LogSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from emberbox.engine.core import Engine
    from emberbox.measure.speed import SpeedOptions
    from emberbox.measure.speed_receipt import SpeedFacts

NAME = "speed"
SUMMARY = "how fast the engine decodes: one sequence at given lengths, drafts, several requests"
DETAILS = """example:
  emberbox measure speed models/ember-nano --engine --device cpu --context 512 --tokens 64 \\
    --concurrency 2 --reply-tokens 64 -o speed.json
  emberbox measure speed --synthetic glm-5.3-flash-base2-published --engine \\
    --context 1024,131072 --fill random -o speed.json

--engine is the lane: scheduler, sampler and network in this process, without HTTP. A sequence has
at most the given number of tokens when its last timed step ends. With --fill random the cache of a
sequence longer than 2,048 tokens is filled with random rows; of its prompt the last chunk is run.
--synthetic makes a model of the released shapes with random weights from --seed: no folder needed,
and nothing it says means anything."""

# Flag, field of SpeedOptions, what it is; their defaults are the record's own.
LISTS = (
    ("--context", "contexts", "tokens of one sequence"),
    ("--step-tokens", "step_tokens", "tokens verified in a step, 1 among them"),
    ("--concurrency", "concurrency", "requests at once; '' for no such runs"),
)
NUMBERS = (
    ("--tokens", "tokens", "timed steps of one sequence"),
    ("--warm-up", "warm_up", "steps before them"),
    ("--prompt-tokens", "prompt_tokens", "of each request at once"),
    ("--reply-tokens", "reply_tokens", "of each request at once"),
    ("--seed", "seed", "of prompts, drafts, rows and weights"),
)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is measured: an idle engine, and how a receipt names its model."""

    engine: "Engine"
    model: "Mapping[str, object]"


def add_arguments(kind: argparse.ArgumentParser) -> None:
    """The flags of this kind of measurement."""
    kind.add_argument("path", nargs="?", type=checkpoint_folder, metavar="PATH", help="checkpoint")
    kind.add_argument("--synthetic", metavar="NAME", help="in place of PATH: a model to make")
    kind.add_argument("--engine", action="store_true", required=True, help="the lane")
    output = kind.add_argument("-o", "--output", type=checkpoint_folder, default=None)
    output.metavar, output.help = "OUT.json", "write a receipt; its name must be free"
    kind.add_argument("--force", action="store_true", help="replace a receipt that is there")
    for flag, name, text in LISTS:
        kind.add_argument(flag, dest=name, type=_numbers, metavar="N,N", help=text)
    for flag, name, text in NUMBERS:
        kind.add_argument(flag, dest=name, type=int, metavar="N", help=text)
    kind.add_argument("--fill", help="prefill (default) or random: how a long sequence is made")
    add_engine_flags(kind)
    # The verb's own --json comes after these flags; without a default this one does not undo it.
    kind.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print the receipt as JSON"
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1024,8192") from None


def run(args: argparse.Namespace) -> int:
    """Check, load, measure, write, show; exit code 0 when all is done, 1 when it is not kept."""
    from emberbox import logs
    from emberbox.measure.preflight import check_command
    from emberbox.measure.speed import measure_speed
    from emberbox.measure.speed_memory import MemoryWatch
    from emberbox.measure.speed_receipt import (
        build_speed_receipt,
        check_speed_output,
        save_speed,
        show_speed,
    )

    logs.set_up(settings_from(LogSettings, args).level)
    options, settings = _options(args), settings_from(EngineSettings, args)
    check_command(_command(args))
    if args.output is not None:
        check_speed_output(args.output, may_replace=args.force)
    memory = MemoryWatch()  # before anything touches a GPU
    subject = _open(args, settings, options.seed)
    device = subject.engine.runner.device
    console = Console(highlight=False, quiet=args.json)
    with StageBar(console) as bar:
        runs = measure_speed(subject.engine, options, bar.show, lambda: memory.look(device))
    facts = _facts(args, subject, settings, memory.peak_bytes(device))
    document = build_speed_receipt(facts, options, runs)
    out = args.output
    code = 0 if out is None else kept(lambda: save_speed(out, document, may_replace=args.force))
    if args.json:
        print(json.dumps(document))
    else:
        console.print(show_speed(document), markup=False)
    return code


def kept(save: Callable[[], object]) -> int:
    """The exit code after `save`. What ended it is told in words on standard error, so that what
    was measured can still be shown, and with --json standard output is one document."""
    try:
        save()
    except EmberboxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _options(args: argparse.Namespace) -> "SpeedOptions":
    from emberbox.measure.speed import SpeedOptions

    if (args.path is None) == (args.synthetic is None):
        raise SettingsError("measure speed: give a PATH or --synthetic NAME, one of the two")
    names = {field.name for field in fields(SpeedOptions)}
    given = {k: v for k, v in vars(args).items() if k in names and v is not None}
    return SpeedOptions(**given)


def _open(args: argparse.Namespace, settings: EngineSettings, seed: int) -> _Subject:
    if args.path is None:
        from emberbox.testing.synthetic import synthetic_engine

        engine = synthetic_engine(args.synthetic, settings, seed=seed)
        size = engine.memory.lines[0].num_bytes
        model = {"name": args.synthetic, "seed": seed, "num_bytes": size}
        return _Subject(engine, {**model, "is_synthetic": True})
    if os.path.isfile(args.path):  # noqa: PTH113  takes a name of any length
        raise CheckpointError(f"{args.path}: a file, expected the folder of config.json")
    from emberbox.cli.open_engine import open_llm
    from emberbox.measure.artifact import artifact

    engine = open_llm(args.path, settings).engine
    return _Subject(engine, {**artifact(args.path), "is_synthetic": False})


def _facts(
    args: argparse.Namespace, subject: _Subject, settings: EngineSettings, peak_bytes: int
) -> "SpeedFacts":
    from emberbox.device import Device
    from emberbox.measure.speed_receipt import SpeedFacts

    engine = subject.engine
    return SpeedFacts(
        command=_command(args),
        model=subject.model,
        device=Device.detect(str(engine.runner.device)).describe(),
        op_table=dict(engine.runner.network.ops.describe()),
        settings=asdict(settings),
        plan={line.name: line.num_bytes for line in engine.memory.lines},
        peak_bytes=peak_bytes,
    )


def _command(args: argparse.Namespace) -> str:
    """The line that measures this again: every flag that was given."""
    words = ["emberbox", "measure", NAME]
    words += ["--synthetic", args.synthetic] if args.path is None else [args.path]
    words += ["--engine"]
    for flag, name, _ in (*LISTS, *NUMBERS, ("--fill", "fill", "")):
        value = getattr(args, name)
        if value is not None:
            words += [flag, ",".join(map(str, value)) if isinstance(value, tuple) else value]
    for name in (field.name for field in fields(EngineSettings)):
        value = getattr(args, name, None)
        if name == "verify_weights":
            words += ["--no-verify"] if value is False else []
        elif value is not None:
            flag = "threads" if name == "num_threads" else name.replace("_", "-")
            words += [f"--{flag}", value]
    # Its name alone: where it lies is of one machine.
    words += ["-o", args.output.name] if args.output is not None else []
    return shlex.join(map(str, words))
