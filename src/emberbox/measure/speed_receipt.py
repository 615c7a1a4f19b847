"""Speed receipts: raw step times and the figures that follow from them; one JSON document.

`results` is computed from `raw` and from the two sizes, and `verify_speed` computes it again. Knows
the engine only as facts that it is handed.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from emberbox.errors import MeasureError, SettingsError
from emberbox.measure.code_version import code_version
from emberbox.measure.documents import (
    parse_document,
    partial_of,
    read_file,
    require_free,
    require_writable,
)
from emberbox.measure.receipt import file_bytes, seal_of
from emberbox.measure.speed import Run, Shape, SpeedOptions, shapes_of
from emberbox.measure.speed_schema import SCHEMA, problems_of
from emberbox.store.durable import disk_problems, flush_folder, remove, write_file
from emberbox.store.strict_json import JsonProblem

MAX_BYTES = 64 << 20
_MAX_LINES = 40
_DIGITS = 6  # of a figure; times are measured to three or four


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFacts:
    """What a receipt says beside the runs.

    model: what ran, by the hashes of its folder or by name and seed. plan: the engine's memory,
    line by line, in bytes. settings: the engine's.
    """

    command: str
    model: Mapping[str, object]
    device: Mapping[str, object]
    op_table: Mapping[str, str]
    settings: Mapping[str, object]
    plan: Mapping[str, int]
    peak_bytes: int


def build_speed_receipt(
    facts: SpeedFacts, options: SpeedOptions, runs: Sequence[Run]
) -> dict[str, Any]:
    """The sealed document."""
    raw = [{**asdict(run), "step_ms": list(run.step_ms)} for run in runs]
    document = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "emberbox": code_version(),
        **{key: dict(v) if isinstance(v, Mapping) else v for key, v in asdict(facts).items()},
        "options": options.as_json(),
        "raw": raw,
        "results": figures(raw, facts.plan, facts.peak_bytes),
    }
    return {**document, "sha256": seal_of(document)}


def figures(
    raw: Sequence[Mapping[str, Any]], plan: Mapping[str, int], peak_bytes: int
) -> dict[str, float]:
    """Every figure by its key.

    decode_tok_s.c1.ctx*: tokens over the time of the timed steps; .cN.wall: over the time from
    submission to the last token. step_ms.m*: median at the first context, .p10 and .p90 beside it,
    and step_ratio.m* to one token. planned_bytes: all lines of the plan but what it leaves free.
    """
    found: dict[str, float] = {}
    for run in raw:
        rate = 1e3 * run["num_tokens"] / run["wall_ms"]
        if run["kind"] == "replies":
            found[f"decode_tok_s.c{run['num_requests']}.wall"] = rate
            continue
        m, where = run["step_tokens"], f"ctx{_short(run['context'])}"
        if m == 1:
            found[f"decode_tok_s.c1.{where}"] = rate
            found |= _spread(f"step_ms.c1.{where}", run["step_ms"])
        if run["context"] == raw[0]["context"]:
            found |= _spread(f"step_ms.m{m}", run["step_ms"])
    one = found["step_ms.m1"]
    ratios = {
        key.replace("step_ms", "step_ratio"): value / one
        for key, value in found.items()
        if key.count(".") == 1 and key != "step_ms.m1"
    }
    found = {key: float(f"{value:.{_DIGITS}g}") for key, value in (found | ratios).items()}
    planned = sum(size for name, size in plan.items() if name != "reserve")
    return {**found, "peak_bytes": peak_bytes, "planned_bytes": planned}


def _spread(key: str, step_ms: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, between neighbours in proportion."""
    tenths = statistics.quantiles(step_ms, n=10, method="inclusive")
    return {key: statistics.median(step_ms), f"{key}.p10": tenths[0], f"{key}.p90": tenths[-1]}


def _short(tokens: int) -> str:
    """1024 as 1k."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def save_speed(path: Path, document: Mapping[str, object], *, may_replace: bool = False) -> None:
    """Write a receipt, whole or not at all. Raises MeasureError for a name that is taken."""
    with disk_problems(path.parent):
        partial = partial_of(path)
        try:
            write_file(partial, [file_bytes(document)])
            require_free(path, may_replace=may_replace)  # late: another process may be as far
            partial.replace(path)
        finally:
            remove(partial)
        flush_folder(path.parent)


def check_speed_output(path: Path, *, may_replace: bool) -> None:
    """See that a receipt can be written to `path`, before anything is measured. Raises
    MeasureError; what is no speed receipt is never replaced."""
    if path.suffix != ".json":
        raise MeasureError(f"{path}: not a place for a receipt", hint="a name ending in .json")
    require_free(path, may_replace=may_replace)
    require_writable(path)
    if path.exists():
        _read(path)


def is_speed(path: Path) -> bool:
    """Whether a file says that it is a receipt of speed, whatever its form."""
    try:
        _read(path)
    except MeasureError:
        return False
    return True


def load_speed(path: Path) -> dict[str, Any]:
    """The document at `path`. Raises MeasureError that names every place of the wrong form."""
    document = _read(path)
    if form := list(islice(problems_of(document), _MAX_LINES)):
        raise MeasureError("\n  - ".join([f"{path}: not a whole receipt of speed:", *form]))
    return document


def verify_speed(path: Path) -> list[str]:
    """What is wrong with a receipt: its seal, its form, runs that its options do not ask for, or a
    figure that its raw times do not give.

    Raises MeasureError for what is no speed receipt.
    """
    document = _read(path)
    is_sealed = document.get("sha256") == seal_of(document)
    problems = [] if is_sealed else ["sha256: the document was changed after it was sealed"]
    if form := list(islice(problems_of(document), _MAX_LINES)):
        return problems + form
    problems += islice(_unasked(document["options"], document["raw"]), _MAX_LINES)
    try:
        again = figures(document["raw"], document["plan"], document["peak_bytes"])
    except (KeyError, ValueError, ArithmeticError) as error:
        return [*problems, f"raw: not the times of a measurement ({error!r})"]
    said = document["results"]
    problems += [
        f"results.{key} is {said.get(key)}, the raw times give {again.get(key)}"
        for key in sorted(again.keys() | said.keys())
        if again.get(key) != said.get(key)
    ]
    return problems


def _read(path: Path) -> dict[str, Any]:
    """A document of this schema, its form not looked at. Raises MeasureError."""
    try:
        document = parse_document(read_file(path, MAX_BYTES))
    except JsonProblem as problem:
        raise MeasureError(f"{path}: {problem}") from None
    if (schema := document.get("schema")) != SCHEMA:
        said = "it has no schema" if schema is None else f"schema {ascii(schema)[:80]}"
        raise MeasureError(f"{path}: not a receipt of speed: {said}, not {SCHEMA!r}")
    return document


def _unasked(options: Mapping[str, Any], raw: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each run that is not the one of the options at its place."""
    try:
        shapes = shapes_of(SpeedOptions(**options))
    except SettingsError as error:
        yield f"options.{error.message}, expected {error.hint}"
        return
    runs = [Shape(*(run[key] for key in Shape._fields)) for run in raw]
    for index, (run, asked) in enumerate(zip_longest(runs, shapes)):
        if run != asked:
            yield f"raw[{index}] is {run}, the options ask for {asked}"


def show_speed(document: Mapping[str, Any]) -> str:
    """The figures as a table of text."""
    results = document["results"]
    width = max(map(len, results), default=0)
    device, version = document["device"], document["emberbox"]
    head = f"{document['model']['name']} on {device['name']}, emberbox {version['version']}"
    rows = [
        f"{key:<{width}}  {value:>16{',' if key.endswith('_bytes') else ''}}"
        for key, value in results.items()
    ]
    return "\n".join([head, *rows])
