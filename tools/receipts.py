"""Receipts of receipts/h200 as tools/summarise.py takes them: read, and held against themselves.

Knows how each kind shows that its figures are those that were written; not what they mean.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.decode_quality import LONG, block_sizes, receipt_of, texts_of
from benchmarks.step_timeline import summed
from emberbox.errors import MeasureError
from emberbox.measure.receipt import seal_of
from emberbox.measure.speed_receipt import verify_speed
from tools.figures import Receipt
from tools.step_figures import PEAK, QUALITY, SPEED, TIMELINE, missing_launches, step_parts

KERNELS = "kernels.json"
Content = Mapping[str, Any]


def read_receipts(folder: Path) -> dict[str, Receipt]:
    """By name, those that are there. Raises SystemExit for one that is not true to itself."""
    found = {}
    for name, problems_of in CHECKS.items():
        path = folder / name
        if not path.exists():
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        for problem in problems_of(path, content):
            raise SystemExit(f"{path}: {problem}")
        found[name] = Receipt(content)
    if TIMELINE in found and SPEED in found:
        for problem in _of_other_steps(found[TIMELINE].content, found[SPEED].content):
            raise SystemExit(f"{folder / TIMELINE}: {problem}")
    return found


def _of_kernels(_: Path, content: Content) -> Iterable[str]:
    raw = {"cases": content["cases"], "code": content["code"]}
    if sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest() != content["raw_sha256"]:
        yield "its figures are not those that its raw_sha256 is of"


def _of_speed(path: Path, _: Content) -> Iterable[str]:
    try:
        yield from verify_speed(path)
    except MeasureError as error:
        yield error.message


def _of_timeline(_: Path, content: Content) -> Iterable[str]:
    yield from _unsealed(content, "step_ms", "kernels")
    for name, (found, least) in missing_launches(content).items():
        yield f"{name} is launched {found} times, a step has {least}: it is not of a whole step"
    if content["by_kernel"] != summed(content["kernels"]):
        yield "by_kernel is not what its kernels sum up to"
    whole, trellis = step_parts(content)
    expected = {"traced_ms": whole, "trellis_ms": trellis, "small_ops_ms": whole - trellis}
    expected["step_ms"] = statistics.median(content["step_ms"])
    yield from _unlike(content["results"], expected)


def _of_other_steps(timeline: Content, speed: Content) -> Iterable[str]:
    """Both have to be of the same step: a narrow page table leaves launches out."""
    found, expected = timeline.get("max_model_len"), speed["settings"].get("max_model_len")
    if found is None or found != expected:
        yield f"max_model_len is {found}, that of {SPEED} {expected}: measure it again"


def _of_quality(_: Path, content: Content) -> Iterable[str]:
    if "raw" not in content:
        yield "it holds no sums that its figures follow from: measure it again"
        return
    yield from _unsealed(content, "raw")
    expected = [(name, block_sizes(len(ids))) for name, ids in texts_of(LONG)]
    for each in content["raw"]:
        if [(text["id"], text["counts"]) for text in each["texts"]] != expected:
            yield f"{each['checkpoint']}: not the texts and blocks of the benchmark"
    try:
        again = receipt_of(content["raw"])
    except (KeyError, ValueError, ArithmeticError) as error:
        yield f"its sums give no figures ({error!r})"
        return
    for key in ("cases", "results"):
        yield from _differences(content[key], again[key], key)


def _unsealed(content: Content, *keys: str) -> Iterable[str]:
    if "raw_sha256" not in content:
        yield "it has no seal: measure it again"
    elif content["raw_sha256"] != seal_of({key: content[key] for key in keys}):
        yield f"{' and '.join(keys)}: not what its raw_sha256 is of"


def _differences(said: Any, own: Any, at: str) -> Iterable[str]:  # noqa: ANN401  # JSON
    """A sentence for each place where the receipt says other than its sums, down to a number."""
    if isinstance(own, dict) and isinstance(said, dict) and own.keys() == said.keys():
        for key, value in own.items():
            yield from _differences(said[key], value, f"{at}.{key}")
    elif isinstance(own, list) and isinstance(said, list) and len(own) == len(said):
        for index, value in enumerate(own):
            yield from _differences(said[index], value, f"{at}[{index}]")
    elif said != own:
        yield f"{at} is {said}, its own sums give {own}"


def _unlike(said: Content, expected: Mapping[str, float]) -> Iterable[str]:
    """A sentence for each that differs by more than the order of a sum."""
    for key, value in expected.items():
        if not math.isclose(said.get(key, math.nan), value, rel_tol=1e-9):
            yield f"{key} is {said.get(key)}, its own numbers give {value:.6g}"


CHECKS: Mapping[str, Callable[[Path, Content], Iterable[str]]] = {
    KERNELS: _of_kernels,
    SPEED: _of_speed,
    PEAK: _of_speed,
    TIMELINE: _of_timeline,
    QUALITY: _of_quality,
}
