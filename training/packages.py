"""Where the natural text comes from: packages pinned by version and hash, each with its licence."""

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.licences import Exclusion

TABLE = Path(__file__).parent / "packages.toml"
# Wheels are taken for this platform everywhere, so that the hashes hold on every machine.
WHEEL_OPTIONS = [
    "--only-binary=:all:",
    "--platform=manylinux_2_28_x86_64",
    "--platform=manylinux_2_27_x86_64",
    "--platform=manylinux_2_17_x86_64",
    "--platform=manylinux2014_x86_64",
    "--platform=any",
    "--python-version=3.11",
    "--implementation=cp",
    "--abi=cp311",
    "--abi=abi3",
    "--abi=none",
]
SDIST_OPTIONS = ["--no-binary=:all:"]


@dataclass(frozen=True, slots=True)
class Package:
    """One line of the table. `held_out`: its text stands in no training row, whole.

    `licence` is that of what is taken; `exclude` names what is not, each with its reason.
    """

    name: str
    version: str
    file: str
    sha256: str
    licence: str
    held_out: bool = False
    exclude: tuple[Exclusion, ...] = ()

    @property
    def is_wheel(self) -> bool:
        return self.file.endswith(".whl")


def read_packages(path: Path = TABLE) -> tuple[Package, ...]:
    """Sorted by name. Raises TypeError for an unknown or missing field."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))["package"]
    return tuple(sorted(map(_package, raw), key=lambda each: each.name))


def _package(entry: dict[str, Any]) -> Package:
    exclude = tuple(Exclusion(**each) for each in entry.pop("exclude", ()))
    return Package(**entry, exclude=exclude)


def download(packages: Sequence[Package], folder: Path) -> None:
    """Fetch what is missing through pip, checked against the hashes.

    pip builds the metadata of source archives, which takes minutes. Raises CalledProcessError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [package for package in packages if not (folder / package.file).is_file()]
    for is_wheel, options in ((True, WHEEL_OPTIONS), (False, SDIST_OPTIONS)):
        lines = [
            f"{package.name}=={package.version} --hash=sha256:{package.sha256}"
            for package in missing
            if package.is_wheel == is_wheel
        ]
        if not lines:
            continue
        wanted = folder / "requirements.txt"
        wanted.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += [*options, "--require-hashes", "-r", str(wanted), "-d", str(folder)]
        subprocess.run(command, check=True)
