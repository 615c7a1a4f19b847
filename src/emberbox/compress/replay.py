"""Compress a few matrices of a finished conversion again, as they were compressed then.

The text moves through what the finished folder holds; only the named matrices are searched. On the
machine that made the folder they come out the same; elsewhere sums differ in their last bits, and
with them a few paths, so errors are compared and not bytes.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from emberbox.compress.beside import REPORT_NAME
from emberbox.compress.conversion_items import Item
from emberbox.compress.encode import Encoded, Encoder
from emberbox.compress.hessian import Hessian
from emberbox.compress.keep_map import KEPT_NAME, Heaviest, read_keep_map
from emberbox.compress.pipeline import LAYER, CompressOptions, Prepared, prepare
from emberbox.compress.recipe import parse_recipe
from emberbox.compress.source import Source
from emberbox.compress.trellis_steps import Search
from emberbox.compress.walk import Walk
from emberbox.errors import CheckpointError
from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.formats.dtypes import TORCH_DTYPES
from emberbox.formats.table import detect
from emberbox.formats.trellis import TILE
from emberbox.store.checkpoint import Checkpoint, open_checkpoint


@dataclass(frozen=True, slots=True)
class Again:
    """A matrix and its proxy error, as the folder says and as it came out now."""

    name: str
    then: float
    now: float

    @property
    def ratio(self) -> float:
        """now / then."""
        return self.now / self.then


@dataclass(frozen=True, slots=True)
class _Replay(Encoder):
    """Searches `names`; everything else is what `made` holds."""

    made: Checkpoint
    names: frozenset[str]

    def __call__(
        self,
        items: Sequence[Item],
        hessian: Callable[[Item], Hessian],
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Iterator[Encoded]:
        for item in items:
            if item.name in self.names or item.target.format == "bf16":
                yield from Encoder.__call__(self, [item], hessian, weights)
            elif item.target.format == "exl3":
                yield Encoded(item, (), _stored(self.made, item.name, item.shape))


def compress_again(
    source: Path, made: Path, names: Sequence[str], search: Search
) -> Iterator[Again]:
    """Each of `names`, in the order of the network. made: what `compress` made of `source`.

    Raises CheckpointError if `made` does not say how it was made or has no such matrix.
    """
    checkpoint = open_checkpoint(made)
    report = _report_of(made)
    missing = [name for name in names if name not in report["matrices"]]
    if missing:
        raise CheckpointError(f"{made}: {REPORT_NAME} has no {', '.join(missing)}")
    prepared = _prepared(source, made, report["calibration"])
    encoder = _Replay(
        Source(prepared.checkpoint, prepared.config),
        search,
        torch.device("cpu"),
        prepared.options.group_bytes,
        checkpoint,
        frozenset(names),
    )
    assert prepared.calibration is not None, "its recipe has a trellis"
    shrink = prepared.plan.recipe.shrink_tokens
    walk = Walk(encoder, prepared.calibration.token_ids, shrink)
    walk.begin()
    left = set(names)
    for unit, items in prepared.plan.groups().items():
        if not unit.startswith(LAYER) or not left:
            continue
        for encoded in walk.layer(int(unit.removeprefix(LAYER)), items):
            if encoded.report is not None:
                name = encoded.item.name
                then = float(report["matrices"][name]["proxy_error"])
                yield Again(name, then, encoded.report.proxy_error)
                left.discard(name)
            if not left:
                break


def decoded_hashes(folder: Path) -> dict[str, str]:
    """Module -> sha256 of its matrix between the rotations (float16, row-major) and its scales.

    Exact on every machine: no product is computed.
    """
    checkpoint = open_checkpoint(folder)
    ends = ".trellis"
    modules = sorted(n.removesuffix(ends) for n in checkpoint.tensors if n.endswith(ends))
    hashes = {}
    for module in modules:
        tiles = checkpoint.tensors[module + ends].shape
        parts = _stored(checkpoint, module, (TILE * tiles[1], TILE * tiles[0])).parts
        digest = hashlib.sha256()
        for tensor in (exl3.inner(parts), parts["suh"], parts["svh"]):
            digest.update(tensor.half().contiguous().numpy().tobytes())
        hashes[module] = digest.hexdigest()
    return hashes


def _report_of(made: Path) -> dict[str, dict[str, Any]]:
    try:
        report: dict[str, dict[str, Any]] = json.loads((made / REPORT_NAME).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{made / REPORT_NAME}: cannot be read: {error}") from error
    return report


def _prepared(source: Path, made: Path, text: Mapping[str, Any]) -> Prepared:
    recipe = parse_recipe((made / "recipe.toml").read_text("utf-8"), "recipe.toml", made)
    if isinstance(recipe.keep, Heaviest):  # which they were, is known: nothing is counted again
        problems: list[str] = []
        recipe = replace(recipe, keep=read_keep_map({"file": KEPT_NAME}, made, problems))
        if problems:
            raise CheckpointError("; ".join(problems))
    rows, cols, seed = (int(text[key]) for key in ("rows", "cols", "seed"))
    prepared = prepare(source, recipe, CompressOptions(rows=rows, cols=cols, seed=seed))
    if prepared.calibration is None or prepared.calibration.sha256 != str(text["sha256"]):
        raise CheckpointError(f"{made}: was made with another calibration text")
    return prepared


def _stored(checkpoint: Checkpoint, module: str, shape: tuple[int, ...]) -> QuantTensor:
    """A matrix as the folder holds it. Raises CheckpointError if it is no trellis there."""
    infos, parts = checkpoint.tensors, {}
    if detect(module, infos) is not exl3.FORMAT:
        raise CheckpointError(f"{checkpoint.folder}: {module} is not stored in EXL3")
    for part, name in exl3.FORMAT.part_names(module).items():
        if name in infos:
            info = infos[name]
            data = torch.empty(info.num_bytes, dtype=torch.uint8)
            checkpoint.read_into(info, data.numpy())
            parts[part] = data.view(TORCH_DTYPES[info.dtype]).view(info.shape)
    out_features, in_features = shape
    return QuantTensor(exl3.FORMAT, parts, (out_features, in_features))
