"""Folders in the published layouts, made from ember-nano, and the weights that they decode to.

EXL3 tiles are random bits: every trellis is valid and decodes to some matrix, whose scale is that
of the original weight. What a test compares is the model of the decoded weights.
"""

import json
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from emberbox.formats import exl3, fp8_block, nvfp4
from emberbox.formats.base import QuantTensor
from emberbox.formats.dtypes import DTYPE_TAGS, TORCH_DTYPES
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.digests import DIGESTS_NAME
from emberbox.store.writer import CheckpointWriter
from tests.helpers.nano import NANO
from tests.helpers.published import MARKER_VALUES, Entry, Layout, entries
from tests.helpers.published_config import json_files

MTP_LAYER = 8  # of ember-nano
SHARD_BYTES = 2_000_000
FORMATS = {
    "fp8": fp8_block.FORMAT,
    "nvfp4": nvfp4.FORMAT,
    "nvfp4_reciprocal": nvfp4.RECIPROCAL,
}


@cache
def nano_tensors() -> dict[str, Tensor]:
    """Every tensor of ember-nano under its released name."""
    checkpoint = open_checkpoint(NANO)
    tensors = {}
    for name, info in checkpoint.tensors.items():
        data = torch.zeros(info.num_bytes, dtype=torch.uint8)
        checkpoint.read_into(info, data.numpy())
        tensors[name] = data.view(TORCH_DTYPES[info.dtype]).view(info.shape)
    return tensors


def write_quantised(folder: Path, layout: Layout) -> dict[str, Tensor]:
    """Write ember-nano in `layout`; returns the decoded weights under the released names."""
    decoded: dict[str, Tensor] = {}
    thirds: dict[str, list[Tensor]] = {}
    with CheckpointWriter(folder, SHARD_BYTES) as writer:
        for entry in nano_entries(layout):
            stored, weight = _stored(entry, layout)
            for name, tensor in stored.items():
                data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                writer.add(name, DTYPE_TAGS[tensor.dtype], tuple(tensor.shape), data)
            if entry.is_duplicate:
                continue
            if entry.third is not None:
                thirds.setdefault(entry.sources[0], []).append(weight)
            else:
                pieces = weight.chunk(len(entry.sources))
                decoded |= dict(zip(entry.sources, pieces, strict=True))
    decoded |= {name: torch.cat(pieces) for name, pieces in thirds.items()}
    _write_rest(folder, layout)
    return decoded


def nano_entries(layout: Layout) -> Iterator[Entry]:
    """What `layout` stores of ember-nano; layers with rates of their own are 3, 6, the MTP's."""
    plain = {n: (DTYPE_TAGS[t.dtype], tuple(t.shape)) for n, t in nano_tensors().items()}
    rates = zip((3, 6, MTP_LAYER), layout.layer_rates.values(), strict=False)
    return entries(replace(layout, layer_rates=dict(rates)), plain, MTP_LAYER)


def _write_rest(folder: Path, layout: Layout) -> None:
    config = json.loads((NANO / "config.json").read_text())
    for name, text in json_files(layout, list(nano_entries(layout)), config, MTP_LAYER).items():
        (folder / name).write_text(json.dumps(text, indent=4))
    for path in NANO.iterdir():
        if "safetensors" not in path.name and path.name not in ("config.json", DIGESTS_NAME):
            shutil.copy(path, folder)


def _stored(entry: Entry, layout: Layout) -> tuple[dict[str, Tensor], Tensor]:
    """Stored tensors by name, checked against the layout's headers, and the decoded weight."""
    joined = torch.cat([nano_tensors()[source] for source in entry.sources])
    whole = joined if entry.third is None else joined.chunk(3)[entry.third]
    if entry.scheme == "plain":
        weight = whole.to(TORCH_DTYPES[entry.dtype])
        stored = {entry.name: weight}
    else:
        if entry.scheme == "exl3":
            quantised = random_exl3(whole, entry, layout.marker)
        else:
            quantised = FORMATS[entry.scheme].quantize(whole)
        names = quantised.format.part_names(entry.name.removesuffix(".weight"))
        stored = {names[part]: tensor for part, tensor in quantised.parts.items()}
        if entry.scheme.startswith("nvfp4"):
            stored[names["input"]] = torch.ones_like(quantised.parts["global"])
        weight = quantised.decode()
    found = {(name, DTYPE_TAGS[t.dtype], tuple(t.shape)) for name, t in stored.items()}
    assert found == set(entry.headers(layout.marker))
    return stored, weight


def random_exl3(like: Tensor, entry: Entry, marker: str | None) -> QuantTensor:
    """A random trellis whose decoded matrix has the standard deviation of `like`."""
    generator = torch.Generator().manual_seed(zlib.crc32(entry.name.encode()))
    rows, columns = like.shape

    def scales(size: int, scale: float) -> Tensor:
        signs = 1 - 2 * torch.randint(2, (size,), generator=generator)
        return (signs * scale * (0.75 + 0.5 * torch.rand(size, generator=generator))).half()

    shape = (columns // 16, rows // 16, int(16 * entry.bits))
    words = torch.randint(-(2**15), 2**15, shape, generator=generator)
    parts = {
        "trellis": words.to(torch.int16),
        "suh": scales(columns, float(like.float().std())),
        "svh": scales(rows, 1.0),
    }
    if marker:
        value = MARKER_VALUES[marker]
        parts[marker] = torch.tensor(value - (1 << 32), dtype=torch.int32)
    return QuantTensor(exl3.FORMAT, parts, (rows, columns))
