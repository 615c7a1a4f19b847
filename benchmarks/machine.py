"""What a receipt says about where and from what it was made."""

import json
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from emberbox import __version__
from emberbox.device import Device

ROOT = Path(__file__).resolve().parent.parent


def about(checkpoint: Path) -> dict[str, Any]:
    """Machine, versions, commit, and the checkpoint by the hash of its weights."""
    weights = sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        weights.update(file.read_bytes())
    return {**about_run("cpu"), "weights_sha256": weights.hexdigest()}


def about_run(device: str) -> dict[str, Any]:
    """Machine, versions, commit; a copy that is no working tree of its own has no commit."""
    is_tree = _git("rev-parse", "--show-toplevel") == str(ROOT)
    commit = _git("rev-parse", "HEAD") if is_tree else ""
    changes = _git("status", "--porcelain", "--", "src", "benchmarks", "models")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "emberbox": __version__,
        "commit": commit,
        "is_clean": bool(commit) and not changes,
        "device": Device.detect(device).describe(),
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
    }


def write(receipt: dict[str, Any], path: Path, indent: int | None = 1) -> None:
    """As JSON that a diff can read, or a short one; the numbers once more on the last line of the
    output."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(receipt, indent=indent) + "\n", encoding="utf-8")
    print(json.dumps(receipt["results"]))


def _git(*arguments: str) -> str:
    """What git prints; nothing on a machine without git, or in a copy that is no repository."""
    if not shutil.which("git"):
        return ""
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()
