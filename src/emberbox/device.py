"""What the program runs on: one CPU or one CUDA device. Knows no model."""

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from emberbox.errors import EnvironmentProblem

UNKNOWN_MEMORY_BYTES = 2 * 1024**3
# Limit and use in bytes, and the line of memory.stat that says how much of it are file pages.
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device. `kind` is "cpu" or "cuda"; sizes in bytes; `capability` of CUDA devices only."""

    kind: str
    index: int
    name: str
    capability: tuple[int, int] | None
    total_memory_bytes: int
    num_multiprocessors: int
    num_threads: int
    architecture: str

    @staticmethod
    def detect(name: str = "auto") -> "Device":
        """The device called "auto" (CUDA if there is one, else the CPU), "cpu", "cuda" or "cuda:N".

        Raises EnvironmentProblem when there is no such device.
        """
        kind, _, index = name.partition(":")
        num_devices = torch.cuda.device_count() if kind != "cpu" else 0
        if name == "cpu" or (name == "auto" and num_devices == 0):
            return _cpu()
        if name != "auto" and not (kind == "cuda" and (name == kind or index.isdigit())):
            raise EnvironmentProblem(
                f"device: {name!r} is not a device", hint="expected auto, cpu, cuda or cuda:N"
            )
        if int(index or 0) >= num_devices:
            raise EnvironmentProblem(
                f"device: {name!r} was asked for, {num_devices} CUDA device(s) are visible",
                hint="use --device cpu, or see `nvidia-smi` and whether torch was built for CUDA",
            )
        return _cuda(int(index or 0))

    @property
    def torch_name(self) -> str:
        """The name torch knows it by, such as "cpu" or "cuda:0"."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def free_memory_bytes(self) -> int:
        """Memory that can be had now.

        On a GPU what the driver says, and what torch keeps of a network that is gone. On a CPU, and
        on a GPU that shares the CPU's memory (where the driver counts the file cache as taken),
        `host_memory_bytes` in place of the driver's.
        """
        if self.kind == "cuda":
            shared = getattr(torch.cuda.get_device_properties(self.index), "is_integrated", 0)
            free = int(torch.cuda.mem_get_info(self.index)[0])
            reserved = torch.cuda.memory_reserved(self.index)
            kept = reserved - torch.cuda.memory_allocated(self.index)
            return (host_memory_bytes() if shared else free) + kept
        return host_memory_bytes()

    def describe(self) -> dict[str, object]:
        """Everything of the device that a result should name, and its fingerprint."""
        return {**asdict(self), "torch": torch.__version__, "fingerprint": self.fingerprint()}

    def fingerprint(self) -> str:
        """16 hex digits; equal on two machines whose figures may be compared."""
        facts = json.dumps({**asdict(self), "torch": torch.__version__}, sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:16]


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Memory a process of this host can still have.

    The kernel's MemAvailable (not MemFree), or what the tightest control group around the process
    leaves, if that is less. Where there is no /proc/meminfo (macOS, BSD): half of the physical
    memory, since what others hold is not known; and 2 GiB where even that is not told (Windows).
    `root` is where /proc and /sys lie.
    """
    available = _meminfo("MemAvailable", root)
    if not available:
        return _physical_memory_bytes() // 2 or UNKNOWN_MEMORY_BYTES
    return min([available, *_cgroup_room(root)])


def _physical_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def _cgroup_room(root: Path) -> Iterator[int]:
    """Limit minus use of each control group, version 2 or 1, that holds this process."""
    for hierarchy, controllers, group in _cgroups(root):
        mount, names = root / "sys/fs/cgroup", _CGROUP_V2
        if hierarchy != "0":
            if "memory" not in controllers.split(","):
                continue
            mount, names = mount / "memory", _CGROUP_V1
        # A container sees its own group as the root, and the path it reads may lead nowhere.
        here = Path(group.lstrip("/"))
        for folder in (mount / here, *(mount / parent for parent in here.parents)):
            limit, used = (_first_number(folder / name) for name in names[:2])
            if limit is not None and used is not None:
                # Cached file pages count as used and can be had back.
                yield max(0, limit - used + _stat(folder / "memory.stat", names[2]))


def _cgroups(root: Path) -> Iterator[list[str]]:
    path = root / "proc/self/cgroup"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        fields = line.split(":", 2)
        if len(fields) == 3:
            yield fields


def _first_number(path: Path) -> int | None:
    """The number in a file; None when there is no file, or "max" stands in it."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _stat(path: Path, key: str) -> int:
    """The number after `key` in a file of such lines; 0 where there is none."""
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)


def _cpu() -> Device:
    return Device(
        kind="cpu",
        index=0,
        name=_cpu_name(),
        capability=None,
        total_memory_bytes=_meminfo("MemTotal"),
        num_multiprocessors=os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        architecture=platform.machine(),
    )


def _cuda(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        kind="cuda",
        index=index,
        name=properties.name,
        capability=(properties.major, properties.minor),
        total_memory_bytes=properties.total_memory,
        num_multiprocessors=properties.multi_processor_count,
        num_threads=torch.get_num_threads(),
        architecture=platform.machine(),
    )


def _cpu_name() -> str:
    """The processor's own name on x86, the machine type where the kernel gives no name (ARM64)."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _meminfo(key: str, root: Path = Path("/")) -> int:
    """One line of /proc/meminfo in bytes; 0 where the system has no such file."""
    path = root / "proc/meminfo"
    if not path.exists():
        return 0
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0
