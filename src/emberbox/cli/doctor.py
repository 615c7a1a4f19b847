"""`emberbox doctor`: the machine, the versions, and which implementation each op would use here."""

import argparse
import json
import platform
import sys
from importlib import metadata

from rich.console import Console
from rich.table import Table

from emberbox import __version__
from emberbox.cli.flags import settings_from
from emberbox.settings import EngineSettings

NAME = "doctor"
SUMMARY = "show the machine, package versions and the op table"
EXAMPLE = """example:
  emberbox doctor
  emberbox doctor --device cpu --json"""

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
    "cuda-core",
    "openai",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto)")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
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


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
