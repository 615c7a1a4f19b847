"""Time and memory of compressing one layer of GLM-5.3-Flash's real shape, made-up weights.

    python -m benchmarks.compress_layer --experts 2 --only-experts --limit-gib 12      (on a CPU)
    python -m benchmarks.compress_layer --device cuda --experts 288         (a whole layer)

The whole way of `emberbox compress` for a layer with experts: moments, factors, search, refit, and
the text moved on. Weights and text are drawn at random, tensor by tensor, so nothing is read from a
disk; how well they compress says nothing. `--search quick` takes a search that finds poor paths in
no time: what is measured then is memory and the rest of the time.

`--limit-gib` is enforced by the system, as RLIMIT_DATA: private memory that can be written, which
is what an allocation takes and all that the weights, factors and text lie in. RLIMIT_AS would also
count what is only reserved: libraries, and 64 MiB of address space for each thread. Stacks of
threads do count. That the limit holds is tried before the work, by asking for more.
"""

import argparse
import resource
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import ROOT, about_run, write
from emberbox.compress.conversion_items import Item
from emberbox.compress.conversion_plan import plan_conversion
from emberbox.compress.encode import Encoder
from emberbox.compress.quantize_exl3 import group_bytes
from emberbox.compress.recipe import load_recipe
from emberbox.compress.source import EXPERTS, Source, expert_of
from emberbox.compress.trellis_steps import Search
from emberbox.compress.walk import Walk, activation_bytes
from emberbox.formats.dtypes import TORCH_DTYPES
from emberbox.model.config import Glm5NextConfig
from emberbox.store.buffers import Buffer, byte_view
from emberbox.store.checkpoint import Checkpoint
from emberbox.store.safetensors_header import TensorInfo
from tests.helpers.quick_search import quick_search
from tests.helpers.released import released_config, released_infos

SCALE = 0.02


@dataclass(frozen=True, slots=True)
class Random(Checkpoint):
    """Tensors drawn once for a shape, and shifted by their names: as quick as a disk."""

    def read_into(self, info: TensorInfo, buffer: Buffer) -> None:
        """Normal values of deviation SCALE, in the tensor's dtype."""
        drawn = _drawn(info.shape, TORCH_DTYPES[info.dtype])
        shift = zlib.crc32(info.name.encode()) % len(drawn)
        whole = torch.frombuffer(byte_view(buffer), dtype=drawn.dtype)
        whole[:shift] = drawn[len(drawn) - shift :]
        whole[shift:] = drawn[: len(drawn) - shift]


@cache
def _drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(shape).encode()))
    return torch.randn(shape, generator=generator).mul_(SCALE).to(dtype).flatten()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layer", type=int, default=4)
    parser.add_argument("--experts", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--cols", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only-experts", action="store_true", help="nothing else is searched")
    parser.add_argument("--limit-gib", type=float, help="of memory, enforced; on a CPU")
    parser.add_argument("--search", choices=["quick", "real"], default="real")
    parser.add_argument("--group-bytes", type=int, default=4 << 30)
    parser.add_argument(
        "--group-experts", type=int, help="searched together, in place of --group-bytes"
    )
    out = ROOT / "benchmarks" / "results" / "compress_layer.json"
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    if options.limit_gib is not None:
        _enforce(int(options.limit_gib * 2**30))
    results = _layer(options)
    write(
        {"benchmark": "compress_layer", **about_run(options.device), "results": results},
        options.out,
    )


def _enforce(limit_bytes: int) -> None:
    """No allocation of this process succeeds beyond the limit. SystemExit if one would."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    for num_bytes, fits in ((limit_bytes, False), (limit_bytes // 2, True)):
        try:
            torch.empty(num_bytes, dtype=torch.uint8)
        except RuntimeError:
            if fits:
                raise SystemExit(f"{num_bytes} bytes are not to be had: no figure") from None
        else:
            if not fits:
                raise SystemExit("the system does not hold RLIMIT_DATA: no figure")


def _layer(options: argparse.Namespace) -> dict[str, object]:
    config_json = released_config(fp8=False)
    config = Glm5NextConfig.from_dict(config_json)
    checkpoint = Random(Path("random"), config_json, released_infos(fp8=False))
    plan = plan_conversion(config, checkpoint.tensors, load_recipe("base2"))
    items = [i for i in plan.groups()[f"layer-{options.layer:03d}"] if _is_taken(i, options)]
    device = torch.device(options.device)
    search, num_threads = _search(options)
    at_once = _group_bytes(items, options)
    encoder = Encoder(Source(checkpoint, config), search, device, at_once)
    walk = Walk(encoder, torch.zeros(options.rows, options.cols, dtype=torch.int64))
    text = config.text
    shape = (options.rows, options.cols, text.hc_mult, text.hidden_size)
    walk.values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(walk.dtype)
    before = _peak_bytes(device)
    start, num_weights, marks = time.perf_counter(), 0, []
    for encoded in walk.layer(options.layer, items):
        if encoded.report is not None:
            num_weights += encoded.item.num_weights
            marks.append(encoded.report.proxy_error)
    seconds = time.perf_counter() - start
    peak = _peak_bytes(device)
    return {
        "layer": options.layer,
        "experts": options.experts,
        "only_experts": options.only_experts,
        "search": options.search,
        "search_threads": num_threads,
        "tokens": options.rows * options.cols,
        "group_bytes": at_once,
        "experts_at_once": max(
            1, encoder.group_size(next(i for i in items if EXPERTS in i.name)) // 2
        ),
        "activation_bytes": activation_bytes(
            text, options.rows * options.cols, walk.dtype.itemsize
        ),
        "seconds": round(seconds, 1),
        "searched_weights": num_weights,
        "weights_per_second": round(num_weights / seconds),
        "peak_bytes": peak,
        "peak_bytes_before": before,
        "limit_bytes": None if options.limit_gib is None else int(options.limit_gib * 2**30),
        "median_proxy_error": sorted(marks)[len(marks) // 2],
    }


def _is_taken(item: Item, options: argparse.Namespace) -> bool:
    """All of the layer but the experts beyond the first ones, or these alone."""
    if EXPERTS not in item.name:
        return not options.only_experts
    return (expert_of(item.name) or 0) < int(options.experts)


def _group_bytes(items: Sequence[Item], options: argparse.Namespace) -> int:
    """Memory for what is searched together: as given, or what gate and up of some experts take."""
    if options.group_experts is None:
        return int(options.group_bytes)
    out_features, in_features = next(i.shape for i in items if EXPERTS in i.name)
    return group_bytes(2 * options.group_experts, in_features, out_features, options.device)


def _search(options: argparse.Namespace) -> tuple[Search, int | None]:
    """The search, and on how many threads it runs if that is a number."""
    if options.search == "quick":
        return quick_search, None
    if options.device == "cpu":
        from emberbox.compress import trellis_search_cpu

        num_threads = trellis_search_cpu.kernel()[1]
        trellis_search_cpu.search(torch.zeros(num_threads, 16, 16), 32, "mul1")  # compiled now
        return trellis_search_cpu.search, num_threads
    from emberbox.compress import trellis_search_cuda

    trellis_search_cuda.check(options.device)
    return trellis_search_cuda.search, None


def _peak_bytes(device: torch.device) -> int:
    """Most memory so far: of the process, or what torch held on the GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
