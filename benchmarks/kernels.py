"""Speed of the trellis kernels on a GPU: correctness first, then medians of CUDA-graph replays.

    python -m benchmarks.kernels --out receipts/h200/kernels.json
    python -m benchmarks.kernels --stamp receipts/h200/kernels.json
    python -m benchmarks.kernels --count receipts/h200/kernels.json

Routed experts of a few tokens run from normalised bfloat16 activations and float32 router logits to
the combined output, with routing drawn afresh before each repeat for each call; linear layers from
bfloat16 rows to bfloat16 rows; both with Hadamard transforms and scales. Calls of a graph take
weights in turn that together fill the cache several times over. Weights are random words: what
they decode to does not change the time. Cubins are built first, in parallel processes.

`--stamp` is for a receipt that was made on a copy without git: where the sources here are clean and
are those that ran, it writes their commit into it. `--count` reads the cubins for a receipt that
was made without a disassembler; no GPU is needed for either. Figures, bars: tools/summarise.py.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from hashlib import sha256
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_cases import check, linear_cases, moe_cases, prefill_cases
from benchmarks.kernel_timing import random_weight, seconds_of
from benchmarks.machine import ROOT, about_run
from benchmarks.machine_code import cuobjdump, inner_loop, usage
from emberbox.device import Device
from emberbox.ops.build import build, nvrtc_version
from emberbox.ops.launch import arch_of, source
from emberbox.ops.linear_exl3.kernel_cuda import SOURCE as LINEAR
from emberbox.ops.linear_exl3.kernel_cuda import gemm_step, linear_exl3
from emberbox.ops.moe_experts.decode_cuda import SOURCE as DECODE
from emberbox.ops.moe_experts.prefill_cuda import SOURCE as PREFILL

MUL1, BFLOAT16 = 2, 2
SMALL_BOX = "sm_121"  # of the machine that is projected to
MEASURED = ("src/emberbox/ops/**/*", "benchmarks/kernel*.py")
SUFFIXES = {".py", ".cu", ".cuh"}
LOOPS = (("multiply_rows", LINEAR), ("gate_up", DECODE), ("down", DECODE))
COPY_BYTES = 4 << 30
NAMES = {"op", "k", "tokens", "rows", "shape", "kernel", "distinct", "why_no_graph"}  # shown
DENSE = 8192
Macros = tuple[tuple[str, int], ...]
Build = tuple[Path, Macros, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "receipts" / "h200" / "kernels.json")
    parser.add_argument("--processes", type=int, default=16, help="that compile")
    parser.add_argument("--stamp", type=Path, metavar="RECEIPT")
    parser.add_argument("--count", type=Path, metavar="RECEIPT")
    options = parser.parse_args()
    if options.stamp or options.count:
        (stamp if options.stamp else count)(options.stamp or options.count)
        return
    Device.detect("cuda")
    arch = arch_of(torch.device("cuda", torch.cuda.current_device()))
    seconds = prebuild(arch, options.processes)
    print(f"compiled in {seconds:.1f} s", flush=True)
    check()
    speeds = {"copy_bytes_per_second": copy_speed(), "dense_flop_per_second": dense_speed()}
    cases = measured(options.out.with_suffix(".partial.json"))
    write(receipt(cases, arch, speeds), options.out)


def measured(partial: Path) -> list[dict[str, Any]]:
    """Every case; where one fails, those before it are left in `partial`."""
    cases: list[dict[str, Any]] = []
    try:
        for case in chain(moe_cases(), linear_cases(), prefill_cases()):
            cases.append(case)
            median = statistics.median(case["us"] or case["eager_us"])
            about = {key: value for key, value in case.items() if key in NAMES}
            print(json.dumps({**about, "median_us": median}), flush=True)
    except Exception:
        write({"cases": cases}, partial)
        raise
    return cases


def receipt(cases: Sequence[dict[str, Any]], arch: str, speeds: dict[str, float]) -> dict[str, Any]:
    """Everything that a reader needs to judge the figures, and the figures."""
    raw = {"cases": list(cases), "code": machine_code(arch)}
    return {
        "benchmark": "kernels",
        **about_run("cuda"),
        "command": "python -m benchmarks.kernels --out receipts/h200/kernels.json",
        "sources_sha256": sources_digest(),
        "nvrtc": nvrtc_version(),
        "driver": _nvidia_smi("driver_version"),
        "clocks_mhz": {
            "highest": _nvidia_smi("clocks.max.sm"),
            "under_load": clock_under_load(),
            "memory": _nvidia_smi("clocks.mem"),
        },
        **speeds,
        "raw_sha256": digest(raw),
        **raw,
    }


def prebuild(arch: str, processes: int) -> float:
    """Seconds of compiling what the cases need. What is left out is compiled at its first use."""
    began = time.perf_counter()
    # A context of its own: a process that knows of a GPU cannot be forked.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(build_one, builds(arch)))
    return time.perf_counter() - began


def builds(arch: str) -> list[Build]:
    """Of every case, and of the kernels that are read for the other machine."""
    tiles = (1, 2)
    found = [
        (LINEAR, linear_macros(k, row_tiles, arch), arch)
        for k in (2, 3, 4, 6)
        for row_tiles in tiles
    ]
    found += [
        (DECODE, decode_macros(k, row_tiles), arch) for k in (2, 2.5, 3, 4) for row_tiles in tiles
    ]
    step = ("STEP", gemm_step(arch))
    found.append((PREFILL, (*kind_macros(2), ("X_TYPE", BFLOAT16), step), arch))
    return found + read(SMALL_BOX)


def read(arch: str) -> list[Build]:
    """Cubins whose loops are counted: one row tile, the rates of the bars and of the head."""
    kinds = [(LINEAR, linear_macros(k, 1, arch), arch) for k in (2, 3, 4, 6)]
    return kinds + [(DECODE, decode_macros(k, 1), arch) for k in (2, 2.5, 3, 4)]


def kind_macros(k: float) -> Macros:
    """Of a rate with the codebook of these measurements."""
    return (("RATE", round(2 * k)), ("CODEBOOK", MUL1))


def linear_macros(k: float, row_tiles: int, arch: str) -> Macros:
    """Of products with one weight."""
    step = ("STEP", gemm_step(arch))
    return (*kind_macros(k), ("ROW_TILES", row_tiles), step, ("X_TYPE", BFLOAT16))


def decode_macros(k: float, row_tiles: int) -> Macros:
    """Of a few tokens, from logits."""
    return (*kind_macros(k), ("ROW_TILES", row_tiles), ("X_TYPE", BFLOAT16), ("LOGITS", 1))


def build_one(what: Build) -> Path:
    """The cubin, in the cache."""
    path, macros, arch = what
    return build(source(path, dict(macros)), arch)


def machine_code(arch: str) -> list[dict[str, Any]]:
    """Per kernel and rate what its cubin says; nothing without a disassembler."""
    tool = cuobjdump()
    if tool is None:
        print("there is no cuobjdump: no instruction is counted", flush=True)
        return []
    pairs = [each for both in zip(read(arch), read(SMALL_BOX), strict=True) for each in both]
    return [entry for what in pairs for entry in _entries(tool, what)]


def _entries(tool: Path, what: Build) -> Iterator[dict[str, Any]]:
    path, macros, arch = what
    cubin = build_one(what)
    for kernel in (name for name, file in LOOPS if file == path):
        loop = inner_loop(tool, cubin, kernel)
        yield {
            "kernel": kernel,
            "arch": arch,
            "k": dict(macros)["RATE"] / 2,
            "cubin_sha256": sha256(cubin.read_bytes()).hexdigest(),
            **usage(tool, cubin, kernel),
            "loop_instructions": loop.num_instructions,
            "loop_kinds": loop.kinds(),
            "loop_weights_per_lane": loop.weights_per_lane(1),
            "streamed_bytes_per_lane": loop.streamed_bytes_per_lane,
        }


def copy_speed() -> float:
    """Bytes read and written per second by torch's copy."""
    source_, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * COPY_BYTES / _fastest(lambda: target.copy_(source_))


def dense_speed() -> float:
    """Floating-point operations per second of torch's bfloat16 product."""
    a, b = (torch.randn(DENSE, DENSE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * DENSE**3 / _fastest(lambda: a @ b)


def _fastest(run: Callable[[], object]) -> float:
    """Seconds, of five."""
    return min([seconds_of(run) for _ in range(6)][1:])


def clock_under_load() -> str:
    """Of the multiprocessors while linear layers run; nothing where it is not told."""
    weight = random_weight(24576, 4096, 4)
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(_nvidia_smi, "clocks.sm")
        while not told.done():
            for _ in range(50):
                linear_exl3(x, weight)
            torch.cuda.synchronize()
    return told.result()


def sources_digest(root: Path = ROOT) -> str:
    """Of the kernels, their launchers and what times them, by name and content."""
    found = sha256()
    for pattern in MEASURED:
        for path in sorted(root.glob(pattern)):
            if path.suffix in SUFFIXES:
                found.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()


def digest(raw: object) -> str:
    """Of figures as canonical JSON."""
    return sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def write(found: dict[str, Any], path: Path) -> None:
    """As JSON, a line for each case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(key)}: {_value(value)}" for key, value in found.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _value(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"
    return json.dumps(value)


def stamp(path: Path) -> None:
    """Raises SystemExit where the sources here are not clean or not those that ran."""
    found = json.loads(path.read_text(encoding="utf-8"))
    here = about_run("cpu")
    if found["commit"]:
        raise SystemExit(f"{path}: names commit {found['commit']} already")
    if not here["is_clean"] or found["sources_sha256"] != sources_digest():
        raise SystemExit(f"{path}: the sources here are not clean, or not those that ran")
    write({**found, "commit": here["commit"], "is_clean": True}, path)


def count(path: Path) -> None:
    """Raises SystemExit where the sources here are not those that ran."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["sources_sha256"] != sources_digest():
        raise SystemExit(f"{path}: the sources here are not those that ran")
    raw = {"cases": found["cases"], "code": machine_code("sm_90")}
    by = {"code_counted_with_nvrtc": nvrtc_version(), "raw_sha256": digest(raw)}
    write({**found, **by, **raw}, path)


def _nvidia_smi(what: str) -> str:
    """What the driver's tool says; nothing where there is none."""
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    main()
