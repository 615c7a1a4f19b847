"""Kernels in `emberbox doctor`: compiled ahead for other machines, and checked on this one."""

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from emberbox.errors import EmberboxError, SettingsError

if TYPE_CHECKING:
    from emberbox.device import Device
    from emberbox.ops.build import Source
    from emberbox.ops.check import Checked

MEASURED = ("error", "tolerance")
# Each has sources(arch): what it compiles ahead there.
KERNEL_MODULES = (
    "emberbox.ops.ahead",
    "emberbox.ops.ahead_step",
    "emberbox.compress.trellis_search_cuda",
)


def print_built(args: argparse.Namespace) -> int:
    """Compile for the architectures of --build; a line for each kernel, or JSON."""
    names = args.build.split(",")
    if "" in names:
        raise SettingsError(
            f"--build: an empty name in {args.build!r}",
            hint="expected one such as sm_90 or sm_121",
        )
    jobs = args.jobs or os.cpu_count() or 1
    built = []
    console = Console(stderr=True)
    columns = (TextColumn("kernels built: {task.completed} of {task.total}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        wanted = wanted_kernels(names)
        task = progress.add_task("", total=len(wanted))
        for kernel in build_kernels(wanted, jobs):
            built.append(kernel)
            progress.advance(task)
    if args.json:
        print(json.dumps({"kernels": built}))
        return 0
    for kernel in built:
        print(f"{kernel['arch']}  {kernel['bytes']:>7} bytes  {kernel['path']}")
    return 0


def wanted_kernels(architectures: list[str]) -> "list[tuple[Source, str]]":
    """Every kernel that is compiled ahead, for each architecture once.

    Raises SettingsError for an unknown one.
    """
    from emberbox.ops.build import check_architecture

    for arch in architectures:
        check_architecture(arch)
    return [
        (source, arch)
        for arch in dict.fromkeys(architectures)
        for module in KERNEL_MODULES
        for source in import_module(module).sources(arch)
    ]


def build_kernels(
    wanted: "list[tuple[Source, str]]", num_jobs: int = 1
) -> Iterator[dict[str, object]]:
    """Each kernel once its cubin lies in the cache, in the order of `wanted` with one job.

    Raises EnvironmentProblem where NVRTC is missing.
    """
    from emberbox.ops.build import build, default_cache

    folder = default_cache()
    first, rest = wanted[:1], wanted[1:]
    if num_jobs == 1:
        first, rest = wanted, []
    # The first one here: what is missing is said once, before there are other processes.
    for source, arch in first:
        yield _described(source, arch, build(source, arch, folder))
    if rest:
        # Threads of one process compile one after another.
        with ProcessPoolExecutor(min(num_jobs, len(rest)), get_context("spawn")) as pool:
            jobs = {
                pool.submit(build, source, arch, folder): (source, arch) for source, arch in rest
            }
            for job in as_completed(jobs):
                yield _described(*jobs[job], job.result())


def _described(source: "Source", arch: str, cubin: Path) -> dict[str, object]:
    return {
        "kernel": source.path.stem,
        "arch": arch,
        "macros": dict(source.macros),
        "bytes": cubin.stat().st_size,
        "path": str(cubin),
    }


def check(device: "Device") -> dict[str, dict[str, Any]]:
    """Kernel of this device and dtype -> how far its worst case is off, and whether it may be."""
    import torch

    from emberbox.ops.check import check_kernels

    try:
        with Console(stderr=True).status("checking kernels; at first use they are compiled"):
            where = torch.device(device.torch_name)
            return worst(check_kernels(where, device.capability or (0, 0)))
    except (EmberboxError, RuntimeError) as problem:  # what is wrong is what is asked for
        return {"all": _facts(None, None, is_right=False, mismatch=str(problem))}


def worst(checked: "Iterable[Checked]") -> dict[str, dict[str, Any]]:
    """The case furthest beyond, or nearest to, its tolerance of each kernel and dtype."""
    report: dict[str, dict[str, Any]] = {}
    for case in sorted(checked, key=lambda c: -c.error / (c.tolerance or 1.0)):
        name = f"{case.op} ({case.kernel}, {str(case.dtype).removeprefix('torch.')})"
        if name not in report:
            error = case.error if isfinite(case.error) else None
            report[name] = _facts(
                error, case.tolerance, is_right=case.is_right, mismatch=case.mismatch
            ) | {"case": dict(case.case)}
    return dict(sorted(report.items()))


def _facts(
    error: float | None, tolerance: float | None, *, is_right: bool, mismatch: str
) -> dict[str, Any]:
    return {"error": error, "tolerance": tolerance, "is_right": is_right, "mismatch": mismatch}


def checks_table(report: dict[str, dict[str, Any]]) -> Table:
    """For people: error against tolerance, and where it is over, the case and the element."""
    table = Table(title="kernels against their references", title_justify="left")
    for name in ("kernel", "error", "tolerance", ""):
        table.add_column(name)
    for name, facts in report.items():
        numbers = ("not finite" if n is None else f"{n:.1e}" for n in map(facts.get, MEASURED))
        said = "" if facts["is_right"] else f"WRONG {facts.get('case', '')} {facts['mismatch']}"
        table.add_row(name, *numbers, said)
    return table
