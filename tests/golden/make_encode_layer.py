"""Makes encode_layer.npz: a whole layer of ember-nano, compressed with the plain numpy search.

    python -m tests.golden.make_encode_layer --walk cpu --out FILE       # inputs: Hessians, plans
    python -m tests.golden.make_encode_layer --processes 16 --out FILE   # the same and trellises

The inputs are made once, by a walk of calibration text through recipe base2; they are in the file,
Hessians as float32, weights as hashes. The second command takes them from the committed file and
needs numpy, torch and safetensors alone: about three hours of CPU. Ended half-way, it goes on.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberbox.compress import trellis_search_numpy
from emberbox.compress.hessian import Hessian
from emberbox.compress.quantize_exl3 import quantize
from emberbox.compress.source import EXPERTS, Source
from emberbox.compress.trellis_plan import TrellisPlan
from emberbox.compress.trellis_steps import Found, Search
from emberbox.model.config import Glm5NextConfig
from emberbox.store.checkpoint import open_checkpoint

MODEL = Path(__file__).parents[2] / "models" / "ember-nano"
COMMITTED = Path(__file__).with_name("encode_layer.npz")
RECIPE, LAYER = "base2", 1
ROWS, COLS, SEED = 8, 512, 0  # of the calibration text
PREFIX = f"model.language_model.layers.{LAYER}."
WEIGHT = ".weight"
WALKS = ("cpu", "numpy")
PROCESSES_PER_MATRIX = 3  # a strip of the smallest matrix has 8 tiles: some stay busy meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """What is compressed, and how. Names are those inside the layer.

    sources: matrices of ember-nano, joined along the first axis. weights_sha256: of their stored
    bytes one after another. hessian: name of the first matrix that is multiplied with the same.
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, int]
    bits: float
    codebook: str
    seed: int
    hessian: str
    weights_sha256: str

    @property
    def plan(self) -> TrellisPlan:
        return TrellisPlan(bits=self.bits, codebook=self.codebook, seed=self.seed)


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that `encode` is given but the weights. about: text and recipe, for the reader."""

    about: Mapping[str, Any]
    matrices: tuple[Matrix, ...]
    hessians: Mapping[str, Hessian]  # float32

    @property
    def digest(self) -> str:
        found = hashlib.sha256(json.dumps(_head(self), sort_keys=True).encode())
        for name in sorted(self.hessians):
            found.update(self.hessians[name].matrix.numpy().tobytes())
        return found.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """trellis int16 [I/16, O/16, 16 bits], suh float16 [I], svh float16 [O]."""

    trellis: NDArray[np.int16]
    suh: NDArray[np.float16]
    svh: NDArray[np.float16]
    proxy_error: float


# -- what the tests use as well -------------------------------------------------------------------


def opened() -> Source:
    """ember-nano."""
    checkpoint = open_checkpoint(MODEL)
    return Source(checkpoint, Glm5NextConfig.from_dict(checkpoint.config))


def weights_of(source: Source, names: Sequence[str]) -> tuple[Tensor, str]:
    """The matrices `names` joined, as stored, and the sha256 of their bytes."""
    parts = [source.raw(PREFIX + name + WEIGHT) for name in names]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.cat(parts), digest.hexdigest()


def encode(source: Source, inputs: Inputs, matrix: Matrix, search: Search) -> Result:
    """One matrix, alone. Raises ValueError if its weights are not those that were recorded."""
    weight, sha256 = weights_of(source, matrix.sources)
    if sha256 != matrix.weights_sha256:
        raise ValueError(f"{matrix.name}: weights of ember-nano {sha256}, {matrix.weights_sha256}")
    hessian = inputs.hessians[matrix.hessian]
    (made,) = quantize([weight], [hessian], [matrix.plan], search, device="cpu")
    parts = {name: made.tensor.parts[name].numpy() for name in ("trellis", "suh", "svh")}
    return Result(**parts, proxy_error=made.report.proxy_error)


def read(path: Path) -> tuple[Inputs, dict[str, Result]]:
    """What `write` wrote; results by name of the matrix, none if there are inputs alone."""
    with np.load(path) as file:
        head = json.loads(file["head"].tobytes())
        hessians = {
            name: Hessian(_unfolded(file[f"hessian/{name}"], size), num_rows)
            for name, (size, num_rows) in head["hessians"].items()
        }
        results = {
            name: Result(*(file[f"{part}/{name}"] for part in ("trellis", "suh", "svh")), error)
            for name, error in head["proxy_errors"].items()
        }
    matrices = (
        Matrix(**m | {"sources": tuple(m["sources"]), "shape": tuple(m["shape"])})
        for m in head["matrices"]
    )
    return Inputs(head["about"], tuple(matrices), hessians), results


def write(path: Path, inputs: Inputs, results: Mapping[str, Result]) -> None:
    """Everything in one file, the same bytes for the same content; complete or not there."""
    errors = {name: result.proxy_error for name, result in results.items()}
    head = json.dumps(_head(inputs) | {"proxy_errors": errors}, indent=1)
    arrays = {"head": np.frombuffer(head.encode(), np.uint8)}
    for name, hessian in inputs.hessians.items():
        arrays[f"hessian/{name}"] = _folded(hessian.matrix)
    for name, result in results.items():
        arrays[f"trellis/{name}"] = result.trellis
        arrays[f"suh/{name}"] = result.suh
        arrays[f"svh/{name}"] = result.svh
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    partial.replace(path)


def _head(inputs: Inputs) -> dict[str, object]:
    sizes = {name: (h.matrix.shape[0], h.num_rows) for name, h in inputs.hessians.items()}
    matrices = [asdict(matrix) for matrix in inputs.matrices]
    return {"about": dict(inputs.about), "matrices": matrices, "hessians": sizes}


def _folded(matrix: Tensor) -> NDArray[np.float32]:
    """The upper triangle of a symmetric matrix, row by row."""
    rows, columns = torch.triu_indices(*matrix.shape)
    folded: NDArray[np.float32] = matrix[rows, columns].numpy()
    return folded


def _unfolded(triangle: NDArray[np.float32], size: int) -> Tensor:
    rows, columns = torch.triu_indices(size, size)
    matrix = torch.empty(size, size)
    matrix[rows, columns] = matrix[columns, rows] = torch.from_numpy(triangle)
    return matrix


# -- the numpy search in many processes -----------------------------------------------------------


@contextmanager
def numpy_search(processes: int) -> Iterator[Search]:
    """trellis_search_numpy.search, tile by tile in processes; threads may call it at once."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:

        def search(tiles: Tensor, num_words: int, codebook: str) -> Found:
            each = [(tile, num_words, codebook) for tile in tiles.numpy()[:, None]]
            found = list(pool.map(_search_tile, each))
            windows = torch.from_numpy(np.stack([windows for windows, _ in found]))
            return Found(windows, torch.from_numpy(np.stack([cost for _, cost in found])))

        yield search


def _search_tile(
    task: tuple[NDArray[np.float32], int, str],
) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    torch.set_num_threads(1)
    tile, num_words, codebook = task
    found = trellis_search_numpy.search(torch.from_numpy(tile), num_words, codebook)
    return found.windows[0].numpy(), found.cost[0].numpy()


# -- the twin -------------------------------------------------------------------------------------


def make_results(
    inputs: Inputs, names: Sequence[str], search: Search, work: Path, at_once: int
) -> dict[str, Result]:
    """The matrices `names`, the largest first; those that lie in `work` are not made again."""
    source = opened()
    chosen = [matrix for matrix in inputs.matrices if matrix.name in names]
    by_size = sorted(chosen, key=lambda matrix: -matrix.shape[0] * matrix.shape[1])

    def made(matrix: Matrix) -> None:
        path = work / f"{matrix.name}.npz"
        if path.exists():
            return
        start = time.monotonic()
        result = encode(source, inputs, matrix, search)
        one = replace(inputs, matrices=(matrix,), hessians={})
        write(path, one, {matrix.name: result})
        told = f"{matrix.name}: {time.monotonic() - start:.0f} s, {result.proxy_error:.6f}"
        print(told, file=sys.stderr, flush=True)

    # Every thread of ours keeps torch to itself: the number of threads changes last bits.
    with ThreadPoolExecutor(at_once, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        list(threads.map(made, by_size))
    return {m.name: read(work / f"{m.name}.npz")[1][m.name] for m in chosen}


# -- the inputs -----------------------------------------------------------------------------------


def make_inputs(search: Search) -> Inputs:
    """Walk the text to LAYER; what the routed experts there become is not waited for."""
    # Here and not above: the other command is to run where the text cannot be tokenised.
    from emberbox.compress.conversion_items import Item
    from emberbox.compress.encode import Encoded, Encoder, _plan
    from emberbox.compress.pipeline import CompressOptions, prepare
    from emberbox.compress.recipe import load_recipe
    from emberbox.compress.walk import Walk

    options = CompressOptions(rows=ROWS, cols=COLS, seed=SEED)
    prepared = prepare(MODEL, load_recipe(RECIPE), options)
    seen: list[tuple[Item, TrellisPlan, Hessian]] = []

    class Watched(Encoder):
        def __call__(
            self, items: Sequence[Item], hessian: Callable[[Item], Hessian]
        ) -> Iterator[Encoded]:
            here = [i for i in items if i.layer == LAYER and i.target.format == "exl3"]
            seen.extend((item, _plan(item), hessian(item)) for item in here)
            left = [i for i in items if i.layer != LAYER or EXPERTS not in i.name]
            return Encoder.__call__(self, left, hessian)

    source = Source(prepared.checkpoint, prepared.config)
    device, calibration = torch.device("cpu"), prepared.calibration
    assert calibration is not None, f"{RECIPE} has a trellis"
    walk = Walk(Watched(source, search, device, options.group_bytes), calibration.token_ids)
    walk.begin()
    groups = prepared.plan.groups()
    for layer in range(LAYER + 1):
        for _ in walk.layer(layer, groups[f"layer-{layer:03d}"]):
            pass
    text = {"text": calibration.source, "text_sha256": calibration.sha256}
    about = {"recipe": RECIPE, "layer": LAYER, "rows": ROWS, "cols": COLS, "seed": SEED, **text}
    return _inputs(source, about, seen)


def _inputs(source: Source, about: Mapping[str, Any], seen: Sequence[tuple[Any, ...]]) -> Inputs:
    """Names without the layer's, Hessians rounded and made symmetric; a shared one stands once."""
    first: dict[int, str] = {}
    matrices, hessians = [], {}
    for item, plan, hessian in seen:
        name = item.name.removeprefix(PREFIX)
        key = first.setdefault(id(hessian), name)
        if key == name:
            rounded = hessian.matrix.float()
            symmetric = _unfolded(_folded(rounded), len(rounded))
            hessians[name] = Hessian(symmetric, hessian.num_rows)
        sources = tuple(one.removeprefix(PREFIX) for one in item.sources)
        matrix = Matrix(
            name=name,
            sources=sources,
            shape=item.shape,
            **asdict(plan),
            hessian=key,
            weights_sha256=weights_of(source, sources)[1],
        )
        matrices.append(matrix)
    return Inputs(about, tuple(matrices), hessians)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--walk", choices=WALKS, help="make inputs alone, with this search")
    parser.add_argument("--inputs", type=Path, default=COMMITTED, help="a file with inputs")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these matrices, and no file")
    parser.add_argument("--work", type=Path, help="finished matrices; default: a temporary folder")
    args = parser.parse_args()
    if args.walk == "cpu":
        from emberbox.compress.trellis_search_cpu import search

        write(args.out, make_inputs(search), {})
        return
    with numpy_search(args.processes) as search:
        if args.walk:
            write(args.out, make_inputs(search), {})
            return
        inputs, _ = read(args.inputs)
        work = args.work or Path(tempfile.gettempdir()) / f"encode-layer-{inputs.digest[:16]}"
        every = [matrix.name for matrix in inputs.matrices]
        at_once = max(2, args.processes // PROCESSES_PER_MATRIX)
        results = make_results(inputs, args.only or every, search, work, at_once)
        if args.only is None:
            write(args.out, inputs, results)


if __name__ == "__main__":
    main()
