"""Kernels as machine code: they compile for every architecture, and two blocks fit on a GB10.

A representative set of macros here, all of them under `slow`.
"""

import re
import struct
from functools import cache
from itertools import product
from pathlib import Path

import pytest

import emberbox
from emberbox.errors import OpError
from emberbox.formats.trellis import RATES
from emberbox.ops import ahead
from emberbox.ops.build import Source, compile_cubin
from emberbox.ops.cubin import Resources, machine_code, resources
from emberbox.ops.launch import THREADS
from emberbox.ops.linear_exl3.kernel_cuda import (
    CODEBOOKS,
    GEMM_SHARED,
    X_TYPES,
    gemm_step,
)
from tests.helpers.gpu import build_all, compiler_or_skip

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "sm_121")
MUL1, MCG = CODEBOOKS["mul1"], CODEBOOKS["mcg"]
TWO_BITS = (4, MUL1)
KINDS = {"2": TWO_BITS, "2.5": (5, MUL1), "3": (6, MUL1), "3mcg": (6, MCG), "4": (8, MUL1)}
FILES = ("linear_exl3", "moe_decode", "moe_prefill")

# A GB10's multiprocessor, and what a block of the package's kernels asks for at launch.
REGISTERS, REGISTER_UNIT, SHARED_BYTES, RESERVED_BYTES = 65_536, 256, 100 << 10, 1 << 10
NUM_EXPERTS = 288
DYNAMIC_BYTES = {
    "multiply_many": GEMM_SHARED * gemm_step("sm_121"),
    "multiply_tiles": GEMM_SHARED * gemm_step("sm_121"),
    "sort_and_rotate": 8 * THREADS // 32 * NUM_EXPERTS,  # scores of a token's experts, per warp
}


def source_of(file, arch, kind=TWO_BITS, row_tiles=1):
    if file == "linear_exl3":
        return ahead.linear(kind, row_tiles, ahead.BFLOAT16, arch)
    if file == "moe_decode":
        return ahead.decode(kind, row_tiles, ahead.BFLOAT16)
    return ahead.prefill(kind, ahead.BFLOAT16, arch)


def sources_of(file, arch):
    """Every combination of macros that a launch may ask for."""
    for kind in ahead.kinds(max(RATES)):
        for x_type in X_TYPES.values():
            if file == "moe_prefill":
                yield ahead.prefill(kind, x_type, arch)
            elif file == "linear_exl3":
                yield from (ahead.linear(kind, tiles, x_type, arch) for tiles in (1, 2))
            else:
                pairs = product((1, 2), (0, 1))
                yield from (ahead.decode(kind, tiles, x_type, logits) for tiles, logits in pairs)


@cache
def cubin(file, arch, kind=TWO_BITS, row_tiles=1):
    compiler_or_skip()
    return compile_cubin(source_of(file, arch, kind, row_tiles), arch)


def blocks_that_fit(used: Resources, dynamic_bytes: int, counts_reserved: bool) -> int:
    """Blocks of 256 threads on one multiprocessor of a GB10."""
    warps = THREADS // 32
    per_warp = -(-used.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    shared = used.shared_bytes + dynamic_bytes + (0 if counts_reserved else RESERVED_BYTES)
    return min(REGISTERS // (warps * per_warp), SHARED_BYTES // shared)


def check_fit(name, code):
    for kernel, used in resources(code).items():
        dynamic = DYNAMIC_BYTES.get(kernel, 0)
        assert used.registers > 0
        assert used.shared_bytes >= RESERVED_BYTES, "sm_121 counts what it reserves"
        blocks = blocks_that_fit(used, dynamic, counts_reserved=True)
        assert blocks >= 2, f"{name}: {kernel} has {used} and {dynamic} bytes at launch"


def test_every_cu_file_of_the_ops_is_here():
    folder = Path(emberbox.__file__).parent / "ops"
    assert {path.stem for path in folder.rglob("*.cu")} == set(FILES)
    assert all(source_of(file, "sm_80").path.stem == file for file in FILES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_it_compiles_for_every_architecture(file, arch):
    found = resources(cubin(file, arch))
    text = source_of(file, arch).path.read_text(encoding="utf-8")
    kernels = re.findall(r'extern "C" __global__ \S+(?: 2\))? void\s+(\w+)\(', text)
    assert set(found) == set(kernels)
    assert len(kernels) == {"linear_exl3": 4, "moe_decode": 3, "moe_prefill": 4}[file]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("file", FILES)
def test_two_blocks_fit_on_a_gb10_and_nothing_is_spilled(file, kind):
    code = cubin(file, "sm_121", kind)
    check_fit(file, code)
    assert {
        name: used.stack_bytes for name, used in resources(code).items() if used.stack_bytes
    } == {}


@pytest.mark.parametrize("file", ["linear_exl3", "moe_decode"])
def test_two_blocks_of_sixteen_rows_fit_on_a_gb10(file):
    check_fit(file, cubin(file, "sm_121", TWO_BITS, 2))


# In the low 12 bits of an instruction of 16 bytes: griddepcontrol.wait and .launch_dependents.
TURN_OPCODES = {0x82E, 0x82D}
TURN = "griddepcontrol"
# PTX instructions in the sources, all known to sm_80.
PLAIN = {"mma.sync.aligned.m16n8k16", "cp.async", "atom.add.acq_rel.gpu.global.s32"}


def opcodes(code):
    return {int.from_bytes(code[at : at + 8], "little") & 0xFFF for at in range(0, len(code), 16)}


@pytest.mark.parametrize("file", FILES)
def test_nothing_of_hopper_is_on_the_common_path(file):
    """From sm_90 on a kernel may start before the one before it has ended (griddepcontrol); a
    kernel for sm_80 compiles without, so that nothing newer than sm_80 is on the common path."""
    found = {a: machine_code(cubin(file, a)).values() for a in ("sm_80", "sm_90")}
    assert not any(opcodes(code) & TURN_OPCODES for code in found["sm_80"])
    assert all(opcodes(code) >= TURN_OPCODES for code in found["sm_90"])


def test_instructions_written_by_hand_are_of_the_common_path():
    folder = Path(emberbox.__file__).parent / "ops"
    for path in [*folder.rglob("*.cu"), *folder.rglob("*.cuh")]:
        text = path.read_text(encoding="utf-8")
        common = re.sub(r"#if __CUDA_ARCH__ >= 900\n.*?#endif", "", text, flags=re.DOTALL)
        assert TURN not in common, path.name
        assert "__CUDA_ARCH__" not in common, path.name
        for name in re.findall(r'asm(?: volatile)?\(\s*"(?:\{?\s*)([a-z][\w.]+)', common):
            assert any(name.startswith(known) for known in PLAIN), f"{path.name}: {name}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_all_macros_compile(file, arch):
    compiler_or_skip()
    sources = list(sources_of(file, arch))
    assert len(sources) == 27 * 3 * {"linear_exl3": 2, "moe_decode": 4, "moe_prefill": 1}[file]
    for source, path in zip(sources, build_all(sources, arch), strict=True):
        if arch == "sm_121":
            check_fit(f"{file} {dict(source.macros)}", path.read_bytes())


def test_what_is_built_ahead_is_what_files_hold():
    found = {(s.path.stem, *sorted(s.macros.items())) for s in ahead.sources("sm_121")}
    assert len(found) == len(ahead.sources("sm_121")) == 60 + 42 + 21
    rates = {s.macros["RATE"] for s in ahead.sources("sm_121")}
    assert rates == {2, 3, 4, 5, 6, 7, 8, 10, 12}


# -- the reader of cubins ------------------------------------------------------------------------

SPILLING = """
extern "C" __global__ void indexed(float* x, int n) {
  __shared__ float shared[96];
  float a[40];
  for (int i = 0; i < 40; i++) a[i] = x[i * n];
  for (int j = 0; j < n; j++) a[j % 40] += a[j * 7 % 40];
  float sum = 0;
  for (int i = 0; i < 40; i++) sum += a[i] * x[i];
  shared[threadIdx.x] = sum;
  __syncthreads();
  x[0] = shared[n];
}
extern "C" __global__ void small(float* x) { x[threadIdx.x] = 1; }
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_121"])
def test_stack_and_shared_memory_are_found(arch, tmp_path):
    compiler_or_skip()
    path = tmp_path / "spilling.cu"
    path.write_text(SPILLING, encoding="utf-8")
    code = compile_cubin(Source(path), arch)
    found = resources(code)
    reserved = 1024 if arch == "sm_121" else 0
    assert found["indexed"].stack_bytes == 160
    assert found["indexed"].shared_bytes == 96 * 4 + reserved
    assert 16 <= found["indexed"].registers <= 64
    assert found["small"].stack_bytes == 0
    assert 2 <= found["small"].registers <= 16
    assert set(machine_code(code)) == {"indexed", "small"}


def test_two_blocks_are_counted_as_the_hardware_does():
    fits = Resources(registers=128, shared_bytes=50 << 10, stack_bytes=0)
    assert blocks_that_fit(fits, 0, counts_reserved=True) == 2
    assert blocks_that_fit(fits, 0, counts_reserved=False) == 1
    assert blocks_that_fit(Resources(129, 1024, 0), 0, counts_reserved=True) == 1
    assert blocks_that_fit(Resources(40, 1024, 0), 48 << 10, counts_reserved=True) == 2
    assert blocks_that_fit(Resources(40, 1024, 0), 50 << 10, counts_reserved=True) == 1


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF\x02\x01", struct.pack("<16s2xH44x", b"\x7fELF\x02\x01", 62)]
)
def test_other_files_are_refused(data):
    with pytest.raises(OpError, match="not a cubin"):
        resources(data)
