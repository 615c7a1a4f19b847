"""Rate of the trellis search on this CPU, and the error it leaves on a Gaussian source.

    python -m benchmarks.trellis_search [--bits 2 3] [--out FILE]

Compiled and plain search must find the same paths, or there is no figure. Rates are weights per
second: of the clock, best and median of the repeats; of processor time over all threads, which is
what an idle machine would reach; and of the plain search in numpy beside it.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import ROOT, about, write
from emberbox.compress import trellis_search_cpu, trellis_search_numpy
from emberbox.compress.trellis_steps import codebook_values
from emberbox.formats.trellis import element_order

# Of a unit Gaussian before the search. At 2 bits the error is flat between 0.96 and 1.00 (32,768
# weights); for other rates give --scan.
SCALE = 0.98
PUBLISHED_MSE = {1: 0.2749, 2: 0.0690, 3: 0.01743, 4: 0.00441}  # mul1, Gaussian source
CHECKED_TILES = 2
REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[2], choices=sorted(PUBLISHED_MSE))
    parser.add_argument("--tiles", type=int, default=128, help="of 256 weights, for the rate")
    parser.add_argument("--mse-tiles", type=int, default=2048, help="for the error")
    parser.add_argument("--scan", type=float, nargs="*", default=[], help="scales to try instead")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results / "trellis_search.json")
    options = parser.parse_args()
    receipt = about(ROOT / "models" / "ember-nano")
    del receipt["weights_sha256"]  # no weights are read
    receipt["results"] = [_result(bits, options) for bits in options.bits]
    write(receipt, options.out)


def _result(bits: int, options: argparse.Namespace) -> dict[str, object]:
    generator = torch.Generator().manual_seed(bits)
    tiles = torch.randn(options.mse_tiles, 16, 16, generator=generator)
    _, num_threads = trellis_search_cpu.kernel()
    plain_rate = _checked_rate_of_numpy(tiles[:CHECKED_TILES], bits)
    timed = tiles[: options.tiles]
    wall, processor = zip(*(_seconds(timed, bits) for _ in range(REPEATS)), strict=True)
    scales = options.scan or [SCALE]
    errors = {scale: _relative_error(tiles, scale, bits) for scale in scales}
    scale = min(errors, key=errors.__getitem__)
    processor_rate = num_threads * timed.numel() / min(processor)
    return {
        "bits": bits,
        "codebook": "mul1",
        "threads": num_threads,
        "weights_per_s_best": round(timed.numel() / min(wall)),
        "weights_per_s_median": round(timed.numel() / statistics.median(wall)),
        "weights_per_processor_s_times_threads": round(processor_rate),
        "numpy_weights_per_processor_s": round(plain_rate),
        "ratio_to_numpy_of_one_thread": processor_rate / num_threads / plain_rate,
        "mse_weights": tiles.numel(),
        "mse": errors[scale],
        "mse_by_scale": errors,
        "scale": scale,
        "published_mse": PUBLISHED_MSE[bits],
        "mse_over_published": errors[scale] / PUBLISHED_MSE[bits],
    }


def _checked_rate_of_numpy(tiles: Tensor, bits: int) -> float:
    compiled = trellis_search_cpu.search(tiles, 16 * bits, "mul1")
    start = time.process_time()
    plain = trellis_search_numpy.search(tiles, 16 * bits, "mul1")
    seconds = time.process_time() - start
    if not torch.equal(compiled.windows, plain.windows):
        raise SystemExit(f"{bits} bits: compiled and plain search differ")
    return tiles.numel() / seconds


def _seconds(tiles: Tensor, bits: int) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    trellis_search_cpu.search(tiles, 16 * bits, "mul1")
    return time.perf_counter() - wall, time.process_time() - processor


def _relative_error(tiles: Tensor, scale: float, bits: int) -> float:
    """Mean squared error over the sample's own mean square: less noise than over 1."""
    found = trellis_search_cpu.search(tiles * scale, 16 * bits, "mul1")
    values = codebook_values("mul1")[found.windows[:, element_order()]].double().view(tiles.shape)
    return float((values / scale - tiles).square().mean() / tiles.double().square().mean())


if __name__ == "__main__":
    main()
