"""`emberbox doctor`: the machine, the versions, and which implementation each op would use here.

With --build: compiles the package's CUDA kernels into the cache, for machines other than this one.
"""

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from importlib import import_module, metadata

from rich.console import Console
from rich.table import Table

from emberbox import __version__
from emberbox.cli.flags import settings_from
from emberbox.settings import EngineSettings

NAME = "doctor"
SUMMARY = "show the machine, package versions and the op table; build kernels ahead"
EXAMPLE = """example:
  emberbox doctor
  emberbox doctor --device cpu --json
  emberbox doctor --build sm_90,sm_121"""

PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "pillow",
    "starlette",
    "uvicorn",
    "msgspec",
    "prometheus-client",
    "rich",
    "triton",
    "numba",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "openai",
)

# Each has sources(arch): what it would compile there.
KERNEL_MODULES = ("emberbox.compress.trellis_search_cuda",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument(
        "--build",
        metavar="ARCHS",
        help="compile all CUDA kernels into EMBERBOX_CACHE, such as for sm_90,sm_121; needs no GPU",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report, or a line for each kernel that was built."""
    if args.build is not None:
        return _print_built(args.build.split(","), as_json=args.json)
    report = examine(settings_from(EngineSettings, args).device)
    if args.json:
        print(json.dumps(report))
        return 0
    console = Console(highlight=False)
    for title, facts in report.items():
        table = Table(title=title, title_justify="left", show_header=False, min_width=40)
        for name, value in facts.items():
            table.add_row(name, str(value))
        console.print(table)
    return 0


def examine(device_name: str) -> dict[str, dict[str, object]]:
    """Section -> fact -> value. Raises EnvironmentProblem when the device is not there."""
    import torch

    from emberbox.device import Device
    from emberbox.ops.table import bind_all

    device = Device.detect(device_name)
    table = bind_all(torch.device(device.torch_name), device.capability or (0, 0))
    return {
        "machine": {
            "system": platform.platform(),
            "python": sys.version.split()[0],
            "emberbox": __version__,
        },
        "device": {**device.describe(), "free_memory_bytes": device.free_memory_bytes()},
        "packages": {name: _version(name) for name in PACKAGES},
        "ops": dict(table.describe()),
    }


def build_kernels(architectures: list[str]) -> Iterator[dict[str, object]]:
    """Each kernel of the package for each architecture, once its cubin lies in the cache.

    Raises SettingsError for an unknown architecture, EnvironmentProblem where NVRTC is missing.
    """
    from emberbox.ops.build import build

    for arch in architectures:
        for module in KERNEL_MODULES:
            for source in import_module(module).sources(arch):
                cubin = build(source, arch)
                yield {
                    "kernel": source.path.stem,
                    "arch": arch,
                    "macros": dict(source.macros),
                    "bytes": cubin.stat().st_size,
                    "path": str(cubin),
                }


def _print_built(architectures: list[str], *, as_json: bool) -> int:
    built = []
    for kernel in build_kernels(architectures):
        built.append(kernel)
        if not as_json:
            print(f"{kernel['arch']}  {kernel['bytes']:>7} bytes  {kernel['path']}", flush=True)
    if as_json:
        print(json.dumps({"kernels": built}))
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
