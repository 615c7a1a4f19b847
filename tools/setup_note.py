"""Say what an installation will download before it starts, and refuse a Python that is too old.

Runs on the system's interpreter before anything is installed: standard library only, and a syntax
that old interpreters read well enough to be told why they are refused.
"""

import argparse
import os
import platform
import shutil
import sys
from pathlib import Path

OLDEST = (3, 11)
CPU_BUILD_GB = 0.2
CUDA_BUILD_GB = 3


def has_nvidia_driver() -> bool:
    """True where the NVIDIA driver is installed; nothing is loaded to find out."""
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def note(torch_version: str, index_url: str, driver: bool) -> str:
    """The text printed before pip starts."""
    size = (
        f"torch {torch_version}: about {CPU_BUILD_GB} GB to download for the CPU build, "
        f"about {CUDA_BUILD_GB} GB for the CUDA build on x86."
    )
    if index_url:
        choice = "TORCH_INDEX_URL is set: torch is taken from there."
    elif driver:
        choice = "An NVIDIA driver is installed here: pip takes torch's default build."
    else:
        choice = (
            "No NVIDIA driver is installed here. If pip starts on gigabytes, stop it, set\n"
            "TORCH_INDEX_URL to the CPU index that pytorch.org names, and run make again."
        )
    return f"{size}\n{choice}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="the version that will be installed")
    parser.add_argument("--venv", required=True, help="the virtual environment to be made")
    args = parser.parse_args()
    if sys.version_info[:2] < OLDEST:
        sys.exit(
            f"emberbox needs Python {OLDEST[0]}.{OLDEST[1]} or newer; {sys.executable} is "
            f"{platform.python_version()}.\n"
            "hint: name another one, for instance make setup PYTHON=python3.12"
        )
    print(f"installing into {args.venv} with Python {platform.python_version()}")
    print(note(args.torch, os.environ.get("TORCH_INDEX_URL", ""), has_nvidia_driver()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
