"""What a cubin says of its kernels: registers, memory, the instructions of the loop that counts.

Read by cuobjdump, from the path, NVIDIA's wheel or Triton's. The loop is the innermost one with
tensor instructions, and of several the one with the fewest instructions for each. Knows no GPU.
"""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

TENSOR = "HMMA"
WEIGHTS_PER_TENSOR = 256  # of one 16 x 16 tile, the first operand
LANES = 32
# Opcodes by what bounds them on a Hopper multiprocessor, in lanes per clock (CUDA C++ programming
# guide, arithmetic throughput, compute capability 9.0). Everything also takes an issue slot, 128.
KINDS = {
    "integer": ("PRMT", "LOP3", "SHF", "IADD3", "LEA", "ISETP", "SEL", "VIADD", "IMNMX"),  # 64
    "multiply": ("IMAD", "IDP"),  # 64
    "half": ("HFMA2", "HADD2", "HMUL2"),  # 128 of pairs
    "shuffle": ("SHFL",),  # 32
    "tensor": (TENSOR,),
    "load": ("LDG", "LDS"),
}
_LINE = re.compile(
    r"/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?(?P<code>[A-Z][\w.]*)(?P<rest>[^;]*);"
)
_TARGET = re.compile(r"0x([0-9a-f]+)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a listing: address, opcode with its modifiers, operands."""

    at: int
    code: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode alone."""
        return self.code.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Instructions of one pass, by opcode; bytes of weights that each lane loads in it."""

    opcodes: dict[str, int]
    streamed_bytes_per_lane: int

    @property
    def num_instructions(self) -> int:
        """Of one warp in one pass."""
        return sum(self.opcodes.values())

    def kinds(self) -> dict[str, int]:
        """Instructions by kind; the rest is "other"."""
        found = {kind: sum(self.opcodes.get(n, 0) for n in names) for kind, names in KINDS.items()}
        return {**found, "other": self.num_instructions - sum(found.values())}

    def weights_per_lane(self, row_tiles: int) -> float:
        """Each tile meets a tensor instruction for each eight rows."""
        return self.opcodes[TENSOR] * WEIGHTS_PER_TENSOR / LANES / row_tiles


def cuobjdump() -> Path | None:
    """The disassembler, or None where there is none."""
    if found := shutil.which("cuobjdump"):
        return Path(found)
    for package, inside in (
        ("nvidia", "*/bin/cuobjdump"),
        ("triton", "backends/nvidia/bin/cuobjdump"),
    ):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if paths := sorted(Path(folder).glob(inside)):
                return paths[0]
    return None


def usage(tool: Path, cubin: Path, kernel: str) -> dict[str, int]:
    """Registers of a thread; bytes of stack and local memory of it, and of shared memory."""
    text = _run(tool, "-res-usage", str(cubin))
    found = _USAGE.search(text.partition(f"Function {kernel}:")[2])
    if found is None:
        raise SystemExit(f"{cubin.name}: cuobjdump tells nothing of {kernel}")
    names = ("registers", "stack_bytes", "shared_bytes", "local_bytes")
    return dict(zip(names, map(int, found.groups()), strict=True))


def inner_loop(tool: Path, cubin: Path, kernel: str) -> Loop:
    """Raises SystemExit where a kernel has no loop with tensor instructions."""
    loop = loop_of(_run(tool, "-sass", "-fun", kernel, str(cubin)))
    if loop is None:
        raise SystemExit(f"{cubin.name}: {kernel} has no loop with tensor instructions")
    return loop


def loop_of(listing: str) -> Loop | None:
    """The loop of a listing by cuobjdump, or None."""
    lines = [Instruction(int(m["at"], 16), m["code"], m["rest"]) for m in _LINE.finditer(listing)]
    bodies = [body for body in _loops(lines) if any(line.name == TENSOR for line in body)]
    innermost = [b for b in bodies if not any(o is not b and _is_inside(o, b) for o in bodies)]
    if not innermost:
        return None
    body = min(innermost, key=lambda lines: len(lines) / _num_tensor(lines))
    return Loop(
        opcodes=dict(Counter(line.name for line in body)),
        streamed_bytes_per_lane=sum(_streamed_bytes(line) for line in body),
    )


def _loops(lines: list[Instruction]) -> Iterator[list[Instruction]]:
    """From the target of a branch backwards to the branch."""
    for line in lines:
        target = _TARGET.search(line.operands) if line.name == "BRA" else None
        if target and (start := int(target[1], 16)) < line.at:
            yield [each for each in lines if start <= each.at <= line.at]


def _is_inside(inner: list[Instruction], outer: list[Instruction]) -> bool:
    return outer[0].at <= inner[0].at and inner[-1].at <= outer[-1].at


def _num_tensor(lines: list[Instruction]) -> int:
    return sum(line.name == TENSOR for line in lines)


def _streamed_bytes(line: Instruction) -> int:
    """Bytes of a load that is marked as read once, as those of weights are."""
    parts = line.code.split(".")
    if parts[0] != "LDG" or "EF" not in parts:
        return 0
    return next((int(part) // 8 for part in parts if part in ("64", "128")), 4)


def _run(tool: Path, *arguments: str) -> str:
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"cuobjdump failed: {done.stderr.strip()}")
    return done.stdout
