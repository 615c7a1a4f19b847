"""The reference's final hidden states, computed once and kept: small beside its logits.

KEY.safetensors holds `window.ID` [T - 1, H] for each window, KEY.json the hash of that file and
what made it; KEY is the hash of that: weights, config, panel, lane, device, torch, and the code
that computes. So a capture is reused only where computing it anew would give the same bits. One
that is damaged is computed anew, with a warning. Knows no network and no metric.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

import emberbox
from emberbox.errors import HeaderError, MeasureError
from emberbox.formats.dtypes import DTYPE_TAGS
from emberbox.measure.documents import canonical_json, parse_document, read_file
from emberbox.store.buffers import Buffer
from emberbox.store.checksums import digest_file
from emberbox.store.durable import disk_problems, flush_folder, remove, write_file
from emberbox.store.safetensors_header import LENGTH_BYTES, read_header
from emberbox.store.strict_json import JsonProblem

log = logging.getLogger(__name__)

SCHEMA = "emberbox.capture.v1"
PREFIX = "window."
MAX_NOTE_BYTES = 1 << 20
# What computes hidden states, in the package's folder.
CODE = ("formats", "model", "ops", "engine", "measure/lanes.py", "measure/capture.py")

Shapes = Mapping[str, tuple[int, int]]  # window id -> [T - 1, H]


@dataclass(frozen=True, slots=True)
class Capture:
    """A file that was checked. is_reused: it was there before."""

    path: Path
    key: str
    sha256: str
    is_reused: bool

    def hidden(self, window_id: str) -> Tensor:
        """[T - 1, H] on the CPU; reads no other window."""
        with safe_open(self.path, "pt") as file:
            found: Tensor = file.get_tensor(PREFIX + window_id)
        return found


def capture(
    folder: Path,
    facts: Mapping[str, object],
    shapes: Shapes,
    dtype: torch.dtype,
    compute: Callable[[], Iterable[Tensor]],
) -> Capture:
    """The capture of `facts` in `folder`: the one that lies there, or what `compute` gives.

    compute: the states of each window of `shapes`, in order, of `dtype`; called if need be. One
    window at a time is in memory. Raises EnvironmentProblem if the folder cannot be written.
    """
    facts = {"schema": SCHEMA, "code": code_sha256(), "torch": torch.__version__, **facts}
    key = hashlib.sha256(canonical_json(facts)).hexdigest()
    path = folder / f"{key}.safetensors"
    found = _reusable(path, facts, shapes, dtype)
    if found is not None:
        return Capture(path, key, found, is_reused=True)
    with disk_problems(folder):
        folder.mkdir(parents=True, exist_ok=True)
        sha256 = _write(path, facts, _chunks(shapes, dtype, compute()))
    return Capture(path, key, sha256, is_reused=False)


@cache
def code_sha256() -> str:
    """Of the source that computes hidden states: another version captures anew."""
    home = Path(emberbox.__file__).parent
    hasher = hashlib.sha256()
    for name in CODE:
        place = home / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.suffix in (".py", ".cu", ".cuh"):
                hasher.update(path.relative_to(home).as_posix().encode() + b"\0")
                hasher.update(path.read_bytes())
    return hasher.hexdigest()


def _reusable(
    path: Path, facts: Mapping[str, object], shapes: Shapes, dtype: torch.dtype
) -> str | None:
    """The hash of the capture at `path`; None if there is none, or a damaged one, which is told."""
    if not path.is_file():
        return None
    try:
        note = parse_document(read_file(path.with_suffix(".json"), MAX_NOTE_BYTES))
        sha256 = digest_file(path).sha256
        header = {name: (i.dtype, i.shape) for name, i in read_header(path).items()}
    except (OSError, JsonProblem, HeaderError, MeasureError) as error:
        log.warning("capture %s: damaged, computed anew: %s", path, error)
        return None
    if canonical_json(note) != canonical_json({**facts, "sha256": sha256}):
        log.warning("capture %s: damaged, computed anew: it is not what its note says", path)
        return None
    if header != {PREFIX + name: (DTYPE_TAGS[dtype], shape) for name, shape in shapes.items()}:
        log.warning("capture %s: damaged, computed anew: it holds other tensors", path)
        return None
    return sha256


def _write(path: Path, facts: Mapping[str, object], chunks: Iterable[Buffer]) -> str:
    """Whole or not there: the note goes first and the states are renamed last."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        digest = write_file(partial, chunks)
        note = {**facts, "sha256": digest.sha256}
        write_file(path.with_suffix(".json"), [json.dumps(note, indent=1).encode()])
        partial.replace(path)
        flush_folder(path.parent)
    finally:
        remove(partial)
    return digest.sha256


def _chunks(shapes: Shapes, dtype: torch.dtype, states: Iterable[Tensor]) -> Iterator[Buffer]:
    """A safetensors file: header, then the windows as they come."""
    header, stop = {}, 0
    for name, shape in shapes.items():
        start, stop = stop, stop + shape[0] * shape[1] * dtype.itemsize
        tag = DTYPE_TAGS[dtype]
        header[PREFIX + name] = {"dtype": tag, "shape": shape, "data_offsets": [start, stop]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % LENGTH_BYTES)
    yield len(raw).to_bytes(LENGTH_BYTES, "little") + raw
    for (name, shape), hidden in zip(shapes.items(), states, strict=True):
        if hidden.dtype != dtype or tuple(hidden.shape) != tuple(shape):
            raise MeasureError(
                f"capture: window {name!r} gave {hidden.dtype} {list(hidden.shape)}, "
                f"expected {dtype} {list(shape)}"
            )
        yield hidden.contiguous().cpu().view(torch.uint8).numpy()
