"""Which emberbox made a receipt: version, and commit where the package runs from its repository."""

import shutil
import subprocess
from pathlib import Path

from emberbox import __version__

_PACKAGE = Path(__file__).resolve().parents[1]
_SECONDS = 20


def code_version() -> dict[str, str | bool]:
    """{"version", "commit", "is_clean"}; installed from a wheel there is no commit: "" and False.

    is_clean: the package's sources are those of the commit.
    """
    root = _PACKAGE.parents[1]
    is_tree = _git("rev-parse", "--show-toplevel") == str(root)
    commit = _git("rev-parse", "HEAD") if is_tree else ""
    changes = _git("status", "--porcelain", "--", str(_PACKAGE)) if commit else ""
    return {"version": __version__, "commit": commit, "is_clean": bool(commit) and not changes}


def _git(*arguments: str) -> str:
    """What git prints; nothing without git, or where it fails."""
    if not shutil.which("git"):
        return ""
    command = ["git", "-C", str(_PACKAGE), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
