"""Fidelity receipts: what was measured, of what, by what, and the figures; one JSON document.

`NAME.json` is canonical JSON (sorted keys, no spaces) and a newline; its key `sha256` is the hash
of the rest. Beside it lies `NAME.record.xz`, from which every figure can be computed again. Knows
the form of a receipt; whether one is true is verify.py's question.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberbox.errors import MeasureError
from emberbox.measure.code_version import code_version
from emberbox.measure.documents import canonical_json, read_file, require_free
from emberbox.measure.metrics import METRIC_VERSION, Positions
from emberbox.measure.panel import Panel
from emberbox.measure.receipt_schema import (
    ACCUMULATION,
    DIRECTION,
    HEAD_POLICY,
    RECORD_SUFFIX,
    SCHEMA,
    problems_of,
)
from emberbox.measure.record import (
    Windows,
    as_stored,
    pack_record,
    read_record,
    record_digest,
)
from emberbox.measure.summary import headlines, summarise
from emberbox.store.checksums import FileDigest
from emberbox.store.durable import disk_problems, flush_folder, remove, write_file
from emberbox.store.strict_json import JsonObject, JsonProblem, parse_object

MAX_BYTES = 16 << 20  # 10,000 windows take about 6 MB
_MAX_LINES = 40
_OWN_KEYS = frozenset({"panel", "lane", "record", "results"})

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One pass of the candidate from loading on: hash of its record, and mean KL."""

    record_sha256: str
    kl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a measurement hands over beside its positions.

    lane: "weights" or "served". reference, candidate: as artifact.py describes a folder. device:
    Device.describe(). op_table: op -> implementation. runs: each cold run, the recorded one first.
    command: a line that does it again.
    """

    panel: Panel
    lane: str
    command: str
    reference: Facts
    candidate: Facts
    device: Facts
    op_table: Mapping[str, str]
    settings: Facts
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt as it lies on disk: of the right form, and not yet verified."""

    path: Path
    document: JsonObject

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401  # JSON, whose form was checked
        return self.document[key]

    @property
    def name(self) -> str:
        """The name of the file, without its suffix."""
        return self.path.name.removesuffix(".json")

    @property
    def windows(self) -> list[tuple[str, str]]:
        """(id, domain) of every window, in order."""
        return [(window["id"], window["domain"]) for window in self["panel"]["windows"]]

    @property
    def record_path(self) -> Path:
        """Where the record lies: beside the receipt."""
        return self.path.with_name(self["record"]["file"])

    def read_record(self) -> dict[str, Positions]:
        """Window id -> positions. Raises MeasureError."""
        windows = self["panel"]["windows"]
        return read_record(self.record_path, {each["id"]: each["positions"] for each in windows})


def run_of(windows: Windows) -> Run:
    """One run of the candidate, by its record."""
    stored = as_stored(windows)
    value = headlines(list(stored.values()))["kl"]["value"]
    if not isinstance(value, float):
        raise MeasureError("no position of this run has finite logits")
    return Run(record_digest(windows), value)


def save(path: Path, measured: Measured, windows: Windows, *, may_replace: bool = False) -> Receipt:
    """Write the record of `windows` (id, positions) and the receipt at `path` (NAME.json).

    may_replace: a pair that is there already. Ended at any time, a receipt is there only with the
    record that is its own. Raises MeasureError when nothing was finite or something is there,
    EnvironmentProblem when the disk refuses.
    """
    if path.suffix != ".json":
        raise MeasureError(f"{path}: a receipt's name ends in .json")
    record_path = path.with_name(path.name.removesuffix(".json") + RECORD_SUFFIX)
    packed = pack_record(windows)
    digest = FileDigest(len(packed), hashlib.sha256(packed).hexdigest())
    document = build_receipt(measured, as_stored(windows), record_path.name, digest)
    with disk_problems(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        require_free(path, record_path, may_replace=may_replace)
        _write_pair({record_path: packed, path: file_bytes(document)})
        flush_folder(path.parent)
    return Receipt(path, document)


def _write_pair(contents: Mapping[Path, bytes]) -> None:
    """All are written before the first takes its place, in the order given: the receipt last, and
    an old one is taken away first, so that none is ever there without its record. The names on the
    way are no other process's."""
    partials = {
        target: target.with_name(f"{target.name}.{os.getpid()}.partial") for target in contents
    }
    try:
        for target, content in contents.items():
            write_file(partials[target], [content])
        receipt = list(contents)[-1]
        receipt.unlink(missing_ok=True)
        flush_folder(receipt.parent)
        for target, partial in partials.items():
            partial.replace(target)
    finally:
        for partial in partials.values():
            remove(partial)


def build_receipt(
    measured: Measured, record: Mapping[str, Positions], file: str, digest: FileDigest
) -> JsonObject:
    """The sealed document. record: as stored in `file`, which holds what `digest` says."""
    panel, means = measured.panel, [run.kl for run in measured.runs]
    document: JsonObject = {
        "schema": SCHEMA,
        "metric_version": METRIC_VERSION,
        "emberbox": code_version(),
        "command": measured.command,
        "panel": {
            "name": panel.name,
            "sha256": panel.sha256,
            "windows": panel_windows(panel),
        },
        "lane": measured.lane,
        "direction": DIRECTION,
        "head_policy": HEAD_POLICY,
        "accumulation": ACCUMULATION,
        "reference": dict(measured.reference),
        "candidate": dict(measured.candidate),
        "device": dict(measured.device),
        "op_table": dict(measured.op_table),
        "settings": dict(measured.settings),
        "runs": {
            "count": len(measured.runs),
            "record_sha256": [run.record_sha256 for run in measured.runs],
            "kl": means,
            "kl_spread": max(means) - min(means),
        },
        "record": {"file": file, "sha256": digest.sha256, "bytes": digest.num_bytes},
        "results": summarise([(each.id, each.domain) for each in panel.windows], record),
    }
    return sealed(document)


def panel_windows(panel: Panel) -> list[JsonObject]:
    """What a receipt says of each window of its panel."""
    return [
        {
            "id": window.id,
            "document": window.document,
            "domain": window.domain,
            "positions": window.num_positions,
            "token_sha256": window.token_sha256(),
        }
        for window in panel.windows
    ]


def load(path: Path) -> Receipt:
    """The receipt at `path`. Raises MeasureError that names every place of the wrong form."""
    try:
        document = parse_object(read_file(path, MAX_BYTES))
    except JsonProblem as problem:
        raise MeasureError(f"{path}: {problem}") from None
    _require_kind(document, path)
    return Receipt(path, _of_right_form(document, str(path)))


def sealed(document: Mapping[str, object]) -> JsonObject:
    """The same with `sha256` as it must be. Raises MeasureError where the form is wrong."""
    whole = {**document, "sha256": seal_of(document)}
    return _of_right_form(parse_object(canonical_json(whole)), "receipt")


def seal_of(document: Mapping[str, object]) -> str:
    """sha256 of the canonical JSON of everything but the key `sha256`."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(canonical_json(rest)).hexdigest()


def file_bytes(document: Mapping[str, object]) -> bytes:
    """A receipt as it is written."""
    return canonical_json(document) + b"\n"


def _require_kind(document: JsonObject, path: Path) -> None:
    """Raises MeasureError, in one line, for what never meant to be a receipt of fidelity."""
    schema = document.get("schema")
    if schema == SCHEMA or (schema is None and document.keys() >= _OWN_KEYS):
        return  # what else is wrong with it is told key by key
    if {"results", "device", "date"} <= document.keys():
        made_by = f"emberbox {document.get('emberbox')}, {document['date']}"
        raise MeasureError(
            f"{path}: results of a benchmark ({made_by}), not a receipt of fidelity",
            hint="read its `results` as they are: they have no record to be computed from again",
        )
    said = "schema is missing" if schema is None else f"schema is {str(schema)[:80]!r}"
    raise MeasureError(f"{path}: not a receipt of fidelity: {said}, expected {SCHEMA!r}")


def _of_right_form(document: JsonObject, where: str) -> JsonObject:
    problems = list(problems_of(document))
    if problems:
        rest = len(problems) - _MAX_LINES
        lines = problems[:_MAX_LINES] + [f"and {rest} more"] * (rest > 0)
        text = "".join(f"\n  - {line}" for line in lines)
        raise MeasureError(f"{where}: not a receipt, {len(problems)} problem(s):{text}")
    return document
