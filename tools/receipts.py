"""Receipts of receipts/h200 as tools/summarise.py takes them: read, and held against themselves.

Knows how each kind shows that its figures are those that were written; not what they mean.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.step_timeline import summed
from emberbox.errors import MeasureError
from emberbox.measure.speed_receipt import verify_speed
from tools.figures import Receipt
from tools.step_figures import PEAK, QUALITY, SPEED, TIMELINE, step_parts

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
    if content["by_kernel"] != summed(content["kernels"]):
        yield "by_kernel is not what its kernels sum up to"
    whole, trellis = step_parts(content)
    expected = {"step_ms": whole, "trellis_ms": trellis, "small_ops_ms": whole - trellis}
    yield from _unlike(content["results"], expected)


def _of_quality(_: Path, content: Content) -> Iterable[str]:
    for case in content["cases"]:
        for part in (case, case.get("long"), case.get("last")):
            if part is not None:
                yield from _unlike(part, {"ratio": part["kl"] / part["kl_plain_bf16"]})
        name = f"{case['checkpoint']}.{case['latents']}"
        yield from _unlike(content["results"], {name: case["ratio"]})


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
