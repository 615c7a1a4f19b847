"""What exactly was measured: a checkpoint folder by the hashes of all it holds, and how it stores
its weights. Reads every byte once; knows no network and no panel.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

from emberbox.errors import CheckpointError, MeasureError
from emberbox.measure.documents import canonical_json, parse_document, read_file
from emberbox.measure.schema import Kind, facts, label, mapping, text
from emberbox.model.config import Glm5NextConfig
from emberbox.model.parameters import TEXT, Parameter, Part
from emberbox.model.weights import Piece, assign
from emberbox.store.checkpoint import CONFIG_NAME, Checkpoint, open_checkpoint
from emberbox.store.checksums import OnBytes, digest_file, hash_next
from emberbox.store.safetensors_header import TensorInfo
from emberbox.store.strict_json import JsonProblem

COMPRESSION_NAME = "compression.json"
MAX_ABOUT_BYTES = 256 << 20
PER_MATRIX = "matrices"  # of compression.json: thousands of lines, which the file itself keeps

_LAYER = re.compile(re.escape(TEXT) + r"layers\.\d+\.")
_IN_LAYER = (
    (".eh_proj", "input projection"),
    (".experts.", "routed experts"),
    (".shared_experts.", "shared expert"),
    (".self_attn.", "attention"),
    (".mlp.", "dense feed-forward"),
)
_OUTSIDE = {"lm_head.weight": "head", f"{TEXT}embed_tokens.weight": "embedding"}
_REST = "norms, routers and the rest"
_MAX_LINES = 10


def artifact(folder: Path, on_bytes: OnBytes = lambda _: None) -> dict[str, object]:
    """The checkpoint in `folder`, as a receipt names it.

    map_sha256 is of the canonical list [name, dtype, shape, sha256 of the bytes] of all tensors by
    name: equal for equal weights, however they are spread over files. storage has a row per place
    in the network, format and rate; its bytes sum up to num_bytes, and bits count the scales.
    files: every visible file. about: compression.json (calibration, tuning, the command) but for
    its report on each matrix.
    Raises CheckpointError, and before any weight is read MeasureError for names and facts that a
    receipt cannot hold.
    """
    checkpoint = open_checkpoint(folder)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    rows, about = storage(config, checkpoint.tensors), _about(folder)
    _check_names(folder, about)
    try:
        files, tensors = _hash_all(checkpoint, on_bytes)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from error
    listed = [
        [name, info.dtype, list(info.shape), tensors[name]]
        for name, info in sorted(checkpoint.tensors.items())
    ]
    return {
        "name": folder.resolve().name,
        "map_sha256": hashlib.sha256(canonical_json(listed)).hexdigest(),
        "num_bytes": checkpoint.num_bytes,
        "num_tensors": len(checkpoint.tensors),
        "storage": rows,
        "files": files,
        "config_sha256": files[CONFIG_NAME],
        "about": about,
    }


def storage(
    config: Glm5NextConfig, tensors: Mapping[str, TensorInfo]
) -> list[dict[str, str | int | float]]:
    """Rows {part, format, bits, weights, bytes} in the order of the network. Reads no weights."""
    assignment = assign(config, tensors)
    sums: dict[tuple[str, str, str], list[int]] = {}
    for placement in assignment.placements:
        for piece in placement.pieces:
            row = sums.setdefault((part_of(piece.parameter), *_stored_as(piece)), [0, 0])
            row[0] += prod(piece.parameter.shape)
            row[1] += sum(info.num_bytes for info in piece.infos.values())
    for info in assignment.spare:
        row = sums.setdefault(("not loaded", info.dtype.lower(), ""), [0, 0])
        row[0] += prod(info.shape)
        row[1] += info.num_bytes
    return [
        {
            "part": part,
            "format": stored,
            "bits": round(8 * num_bytes / weights, 4),
            "weights": weights,
            "bytes": num_bytes,
        }
        for (part, stored, _), (weights, num_bytes) in sums.items()
    ]


def part_of(parameter: Parameter) -> str:
    """What a reader calls the place of a parameter."""
    name = parameter.name
    if parameter.part is Part.VISION:
        return "vision tower"
    prefix = "MTP layer, " if parameter.part is Part.MTP else ""
    if not _LAYER.match(name):
        return _OUTSIDE.get(name, _REST)
    is_matrix = len(parameter.shape) == 2 and ".mlp.gate.weight" not in name
    found = (place for mark, place in _IN_LAYER if mark in name and is_matrix)
    return prefix + next(found, _REST)


def _stored_as(piece: Piece) -> tuple[str, str]:
    """Name of the format (of a plain weight its dtype), and what tells its rates apart."""
    if piece.format is None or piece.format.is_plain:
        return next(iter(piece.infos.values())).dtype.lower(), ""
    trellis = piece.infos.get("trellis")
    return piece.format.name, "" if trellis is None else str(trellis.shape[-1])


def _hash_all(checkpoint: Checkpoint, on_bytes: OnBytes) -> tuple[dict[str, str], dict[str, str]]:
    """sha256 of every visible file by its relative name, and of every tensor's bytes by name."""
    by_file: dict[Path, list[TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        by_file.setdefault(info.file, []).append(info)
    files: dict[str, str] = {}
    tensors: dict[str, str] = {}
    for path in sorted(_visible(checkpoint.folder)):
        name = _name_in(checkpoint.folder, path)
        if path in by_file:
            files[name], found = _hash_shard(path, by_file[path], on_bytes)
            tensors |= found
        else:
            files[name] = digest_file(path, on_bytes).sha256
    return files, tensors


def _visible(folder: Path) -> Iterator[Path]:
    """Every file but hidden ones and those in hidden folders: they are no part of a checkpoint."""
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") for part in parts):
            yield path


def _hash_shard(
    path: Path, infos: list[TensorInfo], on_bytes: OnBytes
) -> tuple[str, dict[str, str]]:
    """The file and each tensor in it, in one pass."""
    whole, tensors, position = hashlib.sha256(), {}, 0
    with path.open("rb", buffering=0) as file:
        for info in sorted(infos, key=lambda info: (info.start, info.stop)):
            hash_next(file, info.start - position, [whole], on_bytes)
            part = hashlib.sha256()
            hash_next(file, info.num_bytes, [whole, part], on_bytes)
            tensors[info.name], position = part.hexdigest(), info.stop
    return whole.hexdigest(), tensors


def _about(folder: Path) -> dict[str, object]:
    path = folder / COMPRESSION_NAME
    if not path.exists():
        return {}
    try:
        found = parse_document(read_file(path, MAX_ABOUT_BYTES))
    except JsonProblem as error:
        raise MeasureError(f"{path}: not what `emberbox compress` writes: {error}") from error
    return {key: value for key, value in found.items() if key != PER_MATRIX}


def _check_names(folder: Path, about: Mapping[str, object]) -> None:
    """Raises MeasureError for what a receipt cannot hold: better now than after the measurement."""
    names = {name: name for name in (_name_in(folder, path) for path in _visible(folder))}
    checks: Iterable[tuple[Kind, object, str]] = (
        (label, folder.resolve().name, "its name"),
        (mapping(text), names, "files"),
        (mapping(facts), about, COMPRESSION_NAME),
    )
    problems = [problem for kind, value, at in checks for problem in kind(value, at)]
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems[:_MAX_LINES])
        raise MeasureError(
            f"{folder}: {len(problems)} thing(s) that a receipt cannot hold:{lines}",
            hint="rename the folder or these files, or move them elsewhere",
        )


def _name_in(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()
