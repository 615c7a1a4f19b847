"""Is a receipt true to itself? Every figure is computed again from the record beside it.

Finds an edited figure, a record of something else, a window that counts twice, another panel under
a known name. Cannot find a receipt that was made up whole: only measuring again can.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from emberbox.errors import MeasureError
from emberbox.measure.metrics import METRIC_VERSION, Positions
from emberbox.measure.panel import Panel, load_panel, shipped_panels
from emberbox.measure.receipt import Receipt, file_bytes, load, panel_windows, run_of, seal_of
from emberbox.measure.summary import summarise
from emberbox.store.checkpoint import CONFIG_NAME
from emberbox.store.checksums import digest_file

# `exp` and the normal quantile come from the C library, whose last digit may differ elsewhere.
RELATIVE = 1e-9
ABSOLUTE = 1e-12
_ROUNDED_BITS = 1e-4
# A shorter window can have the figures of another by chance.
_MIN_TWIN = 8


def verify(path: Path, panel: Panel | None = None) -> list[str]:
    """Everything that is wrong with the receipt at `path`, a sentence each; empty: it is good.

    panel: the one it claims, for a panel that does not ship with the package.
    """
    try:
        receipt = load(path)
    except MeasureError as error:
        return [error.message]
    problems = [*_seal(receipt), *_panel(receipt, panel), *_artifacts(receipt)]
    try:
        record = _checked_record(receipt, problems)
    except MeasureError as error:
        return [*problems, error.message]
    return [*problems, *_twins(record), *_figures(receipt, record)]


def is_shipped(receipt: Receipt) -> bool:
    """Whether its panel is one of the package's by name or hash, which `verify` compares with."""
    return _shipped(receipt) is not None


def _shipped(receipt: Receipt) -> Panel | None:
    """By name or, under another name, by hash."""
    claimed, names = receipt["panel"], shipped_panels()
    if claimed["name"] in names:
        return load_panel(claimed["name"])
    panels = (load_panel(name) for name in names)
    return next((panel for panel in panels if panel.sha256 == claimed["sha256"]), None)


def _seal(receipt: Receipt) -> Iterator[str]:
    found, expected = receipt["sha256"], seal_of(receipt.document)
    if found != expected:
        yield f"sha256 is {found}, the document's is {expected}: it was edited"
    if receipt.path.read_bytes() != file_bytes(receipt.document):
        yield "the file is not canonical JSON: it was written by something else"
    if receipt["metric_version"] != METRIC_VERSION:
        yield (
            f"metric_version is {receipt['metric_version']}, this emberbox computes version "
            f"{METRIC_VERSION}"
        )


def _panel(receipt: Receipt, panel: Panel | None) -> Iterator[str]:
    found = receipt["panel"]
    seen: dict[str, str] = {}
    for window in found["windows"]:
        twin = seen.setdefault(window["token_sha256"], window["id"])
        if twin != window["id"]:
            yield f"panel: windows {twin!r} and {window['id']!r} are the same tokens"
    shipped = _shipped(receipt)
    if shipped is not None and found["name"] != shipped.name:
        yield f"panel.name is {found['name']!r}, its sha256 is that of {shipped.name!r}"
    panel = panel or shipped
    if panel is None:
        return
    if found["sha256"] != panel.sha256:
        yield f"panel.sha256 is {found['sha256']}, {panel.name} has {panel.sha256}"
    yield from _differences(found["windows"], panel_windows(panel), "panel.windows")


def _artifacts(receipt: Receipt) -> Iterator[str]:
    """What an artifact says of its size adds up."""
    for side in ("reference", "candidate"):
        artifact = receipt[side]
        config = artifact["files"].get(CONFIG_NAME, artifact["config_sha256"])
        yield from _differences(artifact["config_sha256"], config, f"{side}.config_sha256")
        total = sum(part["bytes"] for part in artifact["storage"])
        if total != artifact["num_bytes"]:
            yield f"{side}.num_bytes is {artifact['num_bytes']}, its storage adds up to {total}"
        for part in artifact["storage"]:
            bits = 8 * part["bytes"] / part["weights"]
            if abs(part["bits"] - bits) > _ROUNDED_BITS:
                yield f"{side}.storage: {part['part']} has {part['bits']} bits, computed {bits:.4f}"


def _checked_record(receipt: Receipt, problems: list[str]) -> dict[str, Positions]:
    """The record; what is wrong with the file is added to `problems`."""
    claimed, path = receipt["record"], receipt.record_path
    record = receipt.read_record()
    digest = digest_file(path)
    problems += _differences(claimed["bytes"], digest.num_bytes, "record.bytes")
    problems += _differences(claimed["sha256"], digest.sha256, "record.sha256")
    return record


def _twins(record: Mapping[str, Positions]) -> Iterator[str]:
    """Two windows with the reference's figures in common are one window, counted twice."""
    seen: dict[bytes, str] = {}
    for name, positions in record.items():
        figures = positions.reference_nll
        if len(figures) < _MIN_TWIN or figures.min() == figures.max():
            continue
        twin = seen.setdefault(figures.tobytes(), name)
        if twin != name:
            yield f"record: windows {twin!r} and {name!r} hold the same figures"


def _figures(receipt: Receipt, record: Mapping[str, Positions]) -> Iterator[str]:
    try:
        results = summarise(receipt.windows, record)
        run = run_of(list(record.items()))
    except MeasureError as error:
        yield f"record: {error.message}"
        return
    yield from _differences(receipt["results"], results, "results")
    runs = receipt["runs"]
    yield from _differences(runs["count"], len(runs["kl"]), "runs.count")
    yield from _differences(len(runs["record_sha256"]), len(runs["kl"]), "runs.record_sha256")
    yield from _differences(runs["record_sha256"][0], run.record_sha256, "runs.record_sha256[0]")
    yield from _differences(runs["kl"][0], run.kl, "runs.kl[0]")
    yield from _differences(runs["kl_spread"], max(runs["kl"]) - min(runs["kl"]), "runs.kl_spread")
    if len(set(runs["record_sha256"])) == 1 and len(set(runs["kl"])) > 1:
        yield "runs: equal records cannot have different figures"
    yield from _self_comparison(receipt)


def _self_comparison(receipt: Receipt) -> Iterator[str]:
    """Decoded weights through one network: equal weights give equal logits."""
    sides = [receipt[side] for side in ("reference", "candidate")]
    same = [side["map_sha256"] + side["config_sha256"] for side in sides]
    if receipt["lane"] == "weights" and same[0] == same[1]:
        results = receipt["results"]
        for figure, value in (("kl", 0.0), ("reverse_kl", 0.0), ("top1", 1.0), ("top5", 1.0)):
            if results[figure]["value"] != value:
                yield f"{figure} of the reference against itself is not {value}"


def _differences(found: object, expected: object, at: str) -> Iterator[str]:
    """Each place where the two JSON values differ by more than rounding."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key, value in expected.items():  # the keys are those of the schema
            yield from _differences(found[key], value, f"{at}.{key}")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            yield f"{at} has {len(found)} entries, expected {len(expected)}"
        for index, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from _differences(one, other, f"{at}[{index}]")
    elif not _is_equal(found, expected):
        yield f"{at} is {found!r}, computed {expected!r}"


def _is_equal(found: object, expected: object) -> bool:
    if isinstance(found, float) or isinstance(expected, float):
        numbers = [value for value in (found, expected) if isinstance(value, float | int)]
        return len(numbers) == 2 and math.isclose(*numbers, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return found == expected
