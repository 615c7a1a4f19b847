"""What the program runs on: one CPU or one CUDA device. Knows no model."""

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from emberbox.errors import EnvironmentProblem


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
        """Memory that can be had now. On a CPU the kernel's MemAvailable, not MemFree."""
        if self.kind == "cuda":
            return int(torch.cuda.mem_get_info(self.index)[0])
        return _meminfo("MemAvailable")

    def describe(self) -> dict[str, object]:
        """Everything of the device that a result should name, and its fingerprint."""
        return {**asdict(self), "torch": torch.__version__, "fingerprint": self.fingerprint()}

    def fingerprint(self) -> str:
        """16 hex digits; equal on two machines whose figures may be compared."""
        facts = json.dumps({**asdict(self), "torch": torch.__version__}, sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:16]


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


def _meminfo(key: str) -> int:
    """One line of /proc/meminfo in bytes; 0 where the system has no such file."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return 0
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0
