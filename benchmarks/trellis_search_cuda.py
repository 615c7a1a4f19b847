"""Speed of the trellis search on a GPU: whole tiles, both passes, correctness first.

    python -m benchmarks.trellis_search_cuda [--rates 2,3,4] [--repeats 7] [--out FILE]

For each rate: windows and costs must be those of the numpy twin on a few tiles (two Gaussian ones,
one of large values, one of ties), or there is no figure. Then weights per second, median of
repeats, and the squared error on the timed Gaussian tiles beside what no code can beat, 4^-K.
The limit beside the speed: if every multiprocessor issued an fp16 instruction for each of its lanes
in each clock, and a pair of windows took the three that nobody can spare (difference, fused
multiply-add, minimum). Bar: 16 million weights per second at 2 bits on an H200.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import ROOT, about_run, write
from emberbox.compress import trellis_search_numpy
from emberbox.compress.trellis_search_cuda import Shape, search, search_as
from emberbox.compress.trellis_steps import (
    Found,
    codebook_values,
    position_bits,
    targets_by_position,
)
from emberbox.device import Device
from emberbox.errors import EmberboxError
from emberbox.formats.trellis import POSITIONS, TILE
from emberbox.ops.build import build, nvrtc_version

RATES = (2.0, 1.0, 1.5, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0)
BAR = {2.0: 16e6}
VARIED = {
    2.0: (Shape(2, 2, 1, 2, True), Shape(2, 2, 1, 1, True), Shape(2, 2, 2, 2, True)),
    3.0: (Shape(3, 3, 1, 2, True), Shape(3, 3, 2, 2, True)),
    4.0: (Shape(4, 4, 1, 2, True), Shape(4, 4, 1, 2, False)),
}
TILES_PER_BLOCK = 24  # of one timed launch: 20 ms and more
EVALUATIONS = 2 * 65536  # per weight, whatever the rate
LANES = 128  # instructions of single lanes that a multiprocessor issues per clock
PAIR_FLOOR = 3  # instructions per pair of windows
SPREAD = 1.24371  # of the codebooks that are no mul1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES))
    parser.add_argument("--repeats", type=int, default=7)
    out = ROOT / "benchmarks" / "results" / "trellis_search_cuda.json"
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    device = Device.detect("cuda")
    rates = [float(rate) for rate in options.rates.split(",")]
    receipt = {**about_run("cuda"), "repeats": options.repeats, "nvrtc": nvrtc_version()}
    print(json.dumps(receipt["device"]), flush=True)
    raw: dict[str, Any] = {}
    wrong = []
    for rate in rates:
        try:
            raw[f"{rate:g}"] = measure(rate, device, options.repeats)
        except EmberboxError as problem:
            wrong.append(f"{rate:g}")
            print(f"K={rate:g}: {problem}", flush=True)
    receipt |= {"raw": raw, "results": {rate: result["summary"] for rate, result in raw.items()}}
    write(receipt, options.out)
    wrong += [rate for rate, result in raw.items() if not _holds(result["summary"])]
    if wrong:
        raise SystemExit(f"wrong or below the bar at K = {', '.join(wrong)}")


def measure(rate: float, device: Device, repeats: int) -> dict[str, Any]:
    """Check, then time one rate with mul1; whole rates are checked with every codebook."""
    num_words = int(rate * TILE)
    books = ("mul1", "mcg", "3inst") if rate in (2.0, 4.0) else ("mul1",)
    checked = {book: check(num_words, book, device) for book in books}
    print(f"K={rate:g}: equal to the twin {checked}", flush=True)
    summary: dict[str, Any] = {"is_equal": all(checked.values())}
    if not summary["is_equal"]:
        return {"summary": summary}
    tiles = gaussian_tiles(device.num_multiprocessors * TILES_PER_BLOCK, seed=1)
    tiles = tiles.to(device.torch_name)
    seconds, found = timed(partial(search, tiles, num_words, "mul1"), repeats)
    median = statistics.median(seconds)
    per_second = tiles.numel() / median
    clock = _clock_hz(device)
    limit = device.num_multiprocessors * LANES * clock * 2 / PAIR_FLOOR / EVALUATIONS
    summary |= {
        "weights_per_second": round(per_second),
        "spread": round(max(seconds) / min(seconds) - 1, 4),
        "limit_weights_per_second": round(limit),
        "fraction_of_limit": round(per_second / limit, 4),
        "mse": round(error(tiles, found), 6),
        "mse_no_code_can_beat": round(4.0**-rate, 6),
    }
    if rate in BAR:
        summary["at_least"] = BAR[rate]
    print(f"K={rate:g}: {json.dumps(summary)}", flush=True)
    raw: dict[str, Any] = {"seconds": seconds, "num_tiles": len(tiles), "clock_hz": clock}
    raw["cubin_sha256"] = cubin_sha256(num_words, device)
    if rate in VARIED:
        raw["variants"] = variants(rate, tiles, found, repeats)
    return {"summary": summary, **raw}


def cubin_sha256(num_words: int, device: Device) -> str:
    """Of the kernel that was timed: says whether later sources still give the same."""
    arch = "sm_{}{}".format(*device.capability or (0, 0))
    even, odd = position_bits(num_words)[:2]
    shape = Shape.choose(even, odd, arch)
    return sha256(build(shape.source(), arch).read_bytes()).hexdigest()


def variants(rate: float, tiles: Tensor, expected: Found, repeats: int) -> dict[str, Any]:
    """Seconds of other shapes of the kernel; each must find the same windows."""
    seconds = {}
    for shape in VARIED[rate]:
        times, found = timed(partial(search_as, shape, tiles, "mul1"), repeats)
        same = torch.equal(found.windows, expected.windows)
        seconds[str(shape)] = times if same else None
        speed = tiles.numel() / statistics.median(times)
        print(f"K={rate:g}: {shape}: {speed / 1e6:.2f} M/s, same {same}", flush=True)
    return seconds


def check(num_words: int, book: str, device: Device) -> bool:
    """Windows and costs against the twin; more tiles than a wave would hide a reused block."""
    tiles = gaussian_tiles(4, seed=num_words) * (1.0 if book == "mul1" else SPREAD)
    tiles[2] *= 8  # beyond the codebook, some cut
    tiles[3] = tiles[3].round()  # ties
    expected = trellis_search_numpy.search(tiles, num_words, book)
    # Each tile many times over: every block takes several, and all must agree.
    repeated = tiles.repeat(device.num_multiprocessors, 1, 1).to(device.torch_name)
    found = search(repeated, num_words, book)
    count = device.num_multiprocessors
    same = found.windows.cpu().view(count, len(tiles), POSITIONS) == expected.windows
    cost = found.cost.cpu().view(torch.int16).view(count, -1) == expected.cost.view(torch.int16)
    if not (same.all() and cost.all()):
        print(f"  {book}: windows differ in {(~same).sum()}, costs in {(~cost).sum()}", flush=True)
    return bool(same.all() and cost.all())


def timed(run: Callable[[], Found], repeats: int) -> tuple[list[float], Found]:
    """Seconds of each repeat, from handing over the tiles to the windows lying on the device."""
    run()
    seconds = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[1:], found


def error(tiles: Tensor, found: Found) -> float:
    """Mean squared difference of the decoded values."""
    values = codebook_values("mul1", tiles.device).double()[found.windows.long()]
    return float((values - targets_by_position(tiles).double()).square().mean())


def gaussian_tiles(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, TILE, TILE, generator=generator)


def _clock_hz(device: Device) -> float:
    """The highest clock of the multiprocessors; that power may keep it lower is not our limit."""
    from cuda.bindings import driver

    name = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    _, kilohertz = driver.cuDeviceGetAttribute(name, device.index)
    return float(kilohertz) * 1e3


def _holds(summary: dict[str, Any]) -> bool:
    at_least = summary.get("at_least", 0)
    return bool(summary["is_equal"]) and summary["weights_per_second"] >= at_least


if __name__ == "__main__":
    main()
