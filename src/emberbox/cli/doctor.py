"""`emberbox doctor`: the machine, the versions, which implementation each op would use here, and
whether those give what their references give.

With --build: compiles the package's CUDA kernels into the cache, for machines other than this one.
"""

import argparse
import json
import platform
import sys
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.table import Table

from emberbox import __version__
from emberbox.cli.doctor_kernels import check, checks_table, print_built
from emberbox.cli.flags import settings_from
from emberbox.errors import SettingsError
from emberbox.settings import EngineSettings

NAME = "doctor"
SUMMARY = "show the machine and the op table; check kernels here, build them ahead"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument(
        "--build",
        metavar="ARCHS",
        help="compile CUDA kernels into EMBERBOX_CACHE, such as for sm_90,sm_121; needs no GPU",
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help="with --build: kernels compiled at the same time (default: one for each core)",
    )


def positive(text: str) -> int:
    """A number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Print the report, or a line for each kernel that was built; 1 where a kernel is wrong."""
    if args.build is not None:
        return print_built(args)
    if args.jobs is not None:
        raise SettingsError("--jobs: without --build it says nothing")
    report = examine(settings_from(EngineSettings, args).device)
    code = 0 if all(facts["is_right"] for facts in report["kernels"].values()) else 1
    if args.json:
        print(json.dumps(report))
        return code
    console = Console(highlight=False)
    checks = report.pop("kernels")
    for title, facts in report.items():
        table = Table(title=title, title_justify="left", show_header=False, min_width=40)
        for name, value in facts.items():
            table.add_row(name, str(value))
        console.print(table)
    console.print(checks_table(checks))
    return code


def examine(device_name: str) -> dict[str, dict[str, Any]]:
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
        "kernels": check(device),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
