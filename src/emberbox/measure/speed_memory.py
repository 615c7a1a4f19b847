"""The most memory a process took of its device: what else runs there must hold still.

On a GPU the fall of its free memory since before the first CUDA call, so that the context, kernels
and graphs count; on a CPU the process's largest resident size. Knows no engine.
"""

import shutil
import subprocess
import sys

import torch

_QUERY = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
_SECONDS = 20
_MIB = 1 << 20


class MemoryWatch:
    """Made before anything touches the GPU, asked after each piece of work."""

    def __init__(self) -> None:
        self._before = _free_by_uuid()
        self._least_free: int | None = None

    def look(self, device: torch.device) -> None:
        """Note how much is free now."""
        if device.type == "cuda":
            free = int(torch.cuda.mem_get_info(device)[0])
            self._least_free = free if self._least_free is None else min(free, self._least_free)

    def peak_bytes(self, device: torch.device) -> int:
        """Bytes taken at most, as far as was looked."""
        if device.type != "cuda":
            return _resident_bytes()
        self.look(device)
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        before = self._before.get(uuid)
        if before is None:  # no nvidia-smi: the driver's own and other processes' counts too
            before = int(torch.cuda.mem_get_info(device)[1])
        return before - (self._least_free or 0)


def _free_by_uuid() -> dict[str, int]:
    """Free bytes of every GPU, asked without becoming a CUDA process; empty where there is none."""
    if not shutil.which(_QUERY[0]):
        return {}
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_free(done.stdout) if done.returncode == 0 else {}


def parse_free(lines: str) -> dict[str, int]:
    """ "GPU-…, 1024" in MiB, a line per GPU -> bytes; what has no number is left out."""
    found = {}
    for line in lines.splitlines():
        uuid, _, free = line.partition(",")
        if free.strip().isdecimal():
            found[uuid.strip()] = int(free) * _MIB
    return found


def _resident_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
