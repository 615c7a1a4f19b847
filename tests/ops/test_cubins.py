"""Kernels as machine code: they compile for every architecture, and their blocks fit on a GB10.

A representative set of macros here, all of them under `slow`.
"""

import re
import struct
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

import emberbox
from emberbox.errors import OpError
from emberbox.formats.trellis import RATES
from emberbox.ops import ahead, ahead_step
from emberbox.ops.build import Source, compile_cubin
from emberbox.ops.cubin import Resources, machine_code, resources
from emberbox.ops.hyper_close.kernel_cuda import MEAN_BYTES
from emberbox.ops.index_choose import kernel_cuda as index_choose
from emberbox.ops.kda_decode import kernel_cuda as kda_decode
from emberbox.ops.launch import THREADS, TYPES, source
from emberbox.ops.linear_exl3.kernel_cuda import (
    CODEBOOKS,
    GEMM_SHARED,
    gemm_step,
)
from emberbox.ops.mla_decode import kernel_cuda as mla_decode
from emberbox.ops.mla_open import kernel_cuda as mla_open
from emberbox.ops.rotated_linear import kernel_cuda as rotated_linear
from emberbox.ops.small_linear import kernel_cuda as small_linear
from tests.helpers.gpu import build_all, compiler_or_skip

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "sm_121")
MUL1, MCG = CODEBOOKS["mul1"], CODEBOOKS["mcg"]
TWO_BITS = (4, MUL1)
KINDS = {"2": TWO_BITS, "2.5": (5, MUL1), "3": (6, MUL1), "3mcg": (6, MCG), "4": (8, MUL1)}
# Files that multiply with EXL3 weights, and how many ways macros compile them for one kind.
TRELLIS = {
    "linear_exl3": 3 * 2,
    "moe_decode": 3 * 4,
    "moe_prefill": 3,
    "rotated_linear": 3 * 2,
    "rotated_swiglu": 2,
}
# How many kernels a file has.
FILES = {
    "linear_exl3": 4,
    "moe_decode": 3,
    "moe_prefill": 4,
    "rotated_linear": 1,
    "rotated_swiglu": 1,
    "greedy_rows": 1,
    "hyper_close": 1,
    "hyper_open": 2,
    "index_choose": 2,
    "kda_apply": 1,
    "kda_decode": 1,
    "mla_attend": 1,
    "mla_open": 1,
    "mla_products": 8,
    "sample_rows": 4,
    "small_linear": 1,
    "swiglu_open": 1,
}
PLAIN_FILES = tuple(file for file in FILES if file not in TRELLIS)
KERNEL = re.compile(
    r'extern "C" __global__ (?:__launch_bounds__\([^)]*\) )?void\s+'
    r"(?:__launch_bounds__\([^)]*\)\s+)?([\w#]+)\("
)

# A GB10's multiprocessor, and what a block of the package's kernels asks for at launch.
REGISTERS, REGISTER_UNIT, SHARED_BYTES, RESERVED_BYTES = 65_536, 256, 100 << 10, 1 << 10
NUM_EXPERTS, HIDDEN, LATENT, INDEX_HEADS = 288, 4_096, 512, 32
MAX_SEQUENCES, KDA_RANK = 32, 128
DYNAMIC_BYTES = {
    "multiply_many": GEMM_SHARED * gemm_step("sm_121"),
    "multiply_tiles": GEMM_SHARED * gemm_step("sm_121"),
    "sort_and_rotate": 8 * THREADS // 32 * NUM_EXPERTS,  # scores of a token's experts, per warp
    "close_streams": MEAN_BYTES * HIDDEN,
    "attend": mla_decode.shared_bytes(LATENT, torch.bfloat16),
    "kda_decode": 4 * (kda_decode.MAX_TOKENS * kda_decode.TOKEN_FLOATS + kda_decode.FLOATS)
    + kda_decode.MAX_TOKENS * 2 * (2 * KDA_RANK + kda_decode.PAD),
    # Of index_choose; a kernel of that name in sample_rows asks for less.
    "score": INDEX_HEADS * (2 * index_choose.PARTS * index_choose.DIM + 4)
    + index_choose.SEQUENCE_BYTES * MAX_SEQUENCES,
}
BLOCK_THREADS = {"kda_decode": kda_decode.BLOCK, "choose": index_choose.CHOOSERS}


def source_of(file, arch, kind=TWO_BITS, row_tiles=1):
    if file == "linear_exl3":
        return ahead.linear(kind, row_tiles, ahead.BFLOAT16, arch)
    if file == "moe_decode":
        return ahead.decode(kind, row_tiles, ahead.BFLOAT16)
    if file == "moe_prefill":
        return ahead.prefill(kind, ahead.BFLOAT16, arch)
    if file == "rotated_linear":
        return ahead_step.rotated(kind, row_tiles, ahead.BFLOAT16)
    if file == "rotated_swiglu":
        return ahead_step.gate_up(kind, row_tiles)
    # The largest: 64 heads, 8 tokens.
    return max(plain_sources(file), key=lambda s: sorted(s.macros.items()))


def plain_sources(file):
    """What is compiled ahead of a file without EXL3 weights."""
    both = (*ahead_step.of_plain(), *ahead_step.of_latents())
    return [source for source in both if source.path.stem == file]


def in_float32(of):
    """The same with float32 for every type."""
    types = {name: 0 for name in of.macros if name.endswith("TYPE")}
    return source(of.path, {**of.macros, **types})


def sources_of(file, arch):
    """Every combination of macros that a launch may ask for."""
    for kind in ahead.kinds(max(RATES)):
        if file == "rotated_swiglu":
            yield from (ahead_step.gate_up(kind, tiles) for tiles in (1, 2))
            continue
        for x_type in TYPES.values():
            if file == "moe_prefill":
                yield ahead.prefill(kind, x_type, arch)
            elif file == "linear_exl3":
                yield from (ahead.linear(kind, tiles, x_type, arch) for tiles in (1, 2))
            elif file == "rotated_linear":
                yield from (ahead_step.rotated(kind, tiles, x_type) for tiles in (1, 2))
            else:
                pairs = product((1, 2), (0, 1))
                yield from (ahead.decode(kind, tiles, x_type, logits) for tiles, logits in pairs)


@cache
def cubin(file, arch, kind=TWO_BITS, row_tiles=1):
    compiler_or_skip()
    return compile_cubin(source_of(file, arch, kind, row_tiles), arch)


def kernels_in(text):
    """Names in a source; a macro makes one for each number of rows."""
    for name in KERNEL.findall(text):
        each = re.findall(r"^KERNELS\((\d+)\)", text, re.MULTILINE) if "##" in name else [""]
        yield from (name.replace("##ROWS", rows) for rows in each)


def blocks_that_fit(
    used: Resources, dynamic_bytes: int, counts_reserved: bool, threads: int = THREADS
) -> int:
    """Blocks of so many threads on one multiprocessor of a GB10."""
    warps = threads // 32
    per_warp = -(-used.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    shared = used.shared_bytes + dynamic_bytes + (0 if counts_reserved else RESERVED_BYTES)
    return min(REGISTERS // (warps * per_warp), SHARED_BYTES // shared)


def check_fit(file, code, macros=""):
    """Two blocks of a kernel that decodes a trellis: one waits for words while the other decodes.

    The others are bound by their launch or by one pass over memory; a block of attention keeps all
    of a tile in shared memory, one of KDA a head's whole state in registers. One has to fit.
    """
    for kernel, used in resources(code).items():
        dynamic, threads = DYNAMIC_BYTES.get(kernel, 0), BLOCK_THREADS.get(kernel, THREADS)
        has_shared = used.shared_bytes > 0
        assert used.registers > 0
        assert not has_shared or used.shared_bytes >= RESERVED_BYTES, (
            "sm_121 counts what it reserves, where a kernel has any of its own"
        )
        blocks = blocks_that_fit(used, dynamic, has_shared, threads)
        name = f"{file} {macros}: {kernel} has {used} and {dynamic} bytes at launch"
        assert blocks >= (2 if file in TRELLIS else 1), name


def test_every_cu_file_of_the_ops_is_here():
    folder = Path(emberbox.__file__).parent / "ops"
    assert {path.stem for path in folder.rglob("*.cu")} == set(FILES)
    assert all(source_of(file, "sm_80").path.stem == file for file in FILES)


def test_types_have_the_numbers_of_the_sources_in_one_place():
    folder = Path(emberbox.__file__).parent / "ops"
    names = {str(dtype)[6:].upper(): number for dtype, number in TYPES.items()}
    enum = ", ".join(f"{name} = {number}" for name, number in names.items())
    assert f"enum {{ {enum} }};" in (folder / "activations.cuh").read_text(encoding="utf-8")
    written = re.compile(r"torch\.(?:float32|float16|bfloat16): \d[,}]|FP8 = ")
    found = [path.stem for path in folder.rglob("*.py") if written.search(path.read_text("utf-8"))]
    assert sorted(found) == ["fp8_rows", "launch"]


def test_the_longest_keys_fill_static_shared_memory():
    """What mla_decode says of MAX_KEY: one step more does not fit."""
    compiler_or_skip()
    sizes = {"HEADS": 1, "KEY": mla_decode.MAX_KEY, "VALUE": 128, "LATENT": mla_decode.MAX_LATENT}
    macros = {**sizes, "X_TYPE": ahead.BFLOAT16, "W_TYPE": ahead.BFLOAT16}
    found = resources(compile_cubin(source(mla_decode.PRODUCTS, macros), "sm_90"))
    assert found["absorb_8"].shared_bytes - RESERVED_BYTES == 48 << 10
    longer = source(mla_decode.PRODUCTS, {**macros, "KEY": mla_decode.MAX_KEY + 8})
    with pytest.raises(OpError, match="too much shared data"):
        compile_cubin(longer, "sm_90")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_it_compiles_for_every_architecture(file, arch):
    found = resources(cubin(file, arch))
    kernels = list(kernels_in(source_of(file, arch).path.read_text(encoding="utf-8")))
    assert set(found) == set(kernels)
    assert len(kernels) == FILES[file]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("file", TRELLIS)
def test_two_blocks_fit_on_a_gb10_and_nothing_is_spilled(file, kind):
    code = cubin(file, "sm_121", kind)
    check_fit(file, code)
    assert spilled(code) == {}


@pytest.mark.parametrize("file", PLAIN_FILES)
def test_a_block_of_the_others_fits_on_a_gb10_and_nothing_is_spilled(file):
    code = cubin(file, "sm_121")
    check_fit(file, code)
    assert spilled(code) == {}


def spilled(code):
    return {name: used.stack_bytes for name, used in resources(code).items() if used.stack_bytes}


@pytest.mark.parametrize("file", ["linear_exl3", "moe_decode", "rotated_linear", "rotated_swiglu"])
def test_two_blocks_of_sixteen_rows_fit_on_a_gb10(file):
    check_fit(file, cubin(file, "sm_121", TWO_BITS, 2))


# In the low 12 bits of an instruction of 16 bytes: griddepcontrol.wait and .launch_dependents.
TURN_OPCODES = {0x82E, 0x82D}
TURN = "griddepcontrol"
# PTX instructions in the sources, all known to sm_80.
PLAIN = {
    "mma.sync.aligned.m16n8k16",
    "ldmatrix.sync.aligned.m8n8.x4",
    "cp.async",
    "prefetch.global.L2",
    "rcp.approx.ftz.f32",
    "atom.add.acq_rel.gpu.global.s32",
}


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
@pytest.mark.parametrize("file", TRELLIS)
def test_all_macros_compile(file, arch):
    compiler_or_skip()
    sources = list(sources_of(file, arch))
    assert len(sources) == 27 * TRELLIS[file]
    check_all(file, sources, arch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", PLAIN_FILES)
def test_all_plain_macros_compile(file, arch):
    compiler_or_skip()
    ahead_ones = plain_sources(file)
    widest = in_float32(source_of(file, arch))
    check_all(file, [*ahead_ones, *([widest] if widest not in ahead_ones else [])], arch)


def check_all(file, sources, arch):
    for of, path in zip(sources, build_all(sources, arch), strict=True):
        if arch == "sm_121":
            check_fit(file, path.read_bytes(), dict(of.macros))


def test_what_is_built_ahead_is_what_files_hold():
    found = {(s.path.stem, *sorted(s.macros.items())) for s in ahead.sources("sm_121")}
    assert len(found) == len(ahead.sources("sm_121")) == 60 + 42 + 21
    rates = {s.macros["RATE"] for s in ahead.sources("sm_121")}
    assert rates == {2, 3, 4, 5, 6, 7, 8, 10, 12}


def test_what_a_decode_step_launches_is_built_ahead_once():
    built = [*ahead.sources("sm_121"), *ahead_step.sources("sm_121")]
    assert len({(s.path.stem, *sorted(s.macros.items())) for s in built}) == len(built)
    count = Counter(s.path.stem for s in ahead_step.sources("sm_121"))
    assert set(count) == {*PLAIN_FILES, "rotated_linear", "rotated_swiglu", "moe_decode"}
    assert [count[name] for name in ("rotated_linear", "rotated_swiglu", "moe_decode")] == [
        60,
        42,
        42,
    ]
    assert [count[name] for name in ("mla_products", "mla_attend", "small_linear")] == [4, 4, 8]
    # Macros are those of a launch: of the full model, in the types that a decode step has.
    kv_b = torch.empty(64, 512, 512, dtype=torch.float16, device="meta")
    latents = torch.empty(64, 512, dtype=torch.float8_e4m3fn, device="meta")
    half = torch.bfloat16
    wanted = {
        "mla_products": mla_decode.product_macros(half, kv_b, 64 * 256),
        "mla_attend": mla_decode.attend_macros(half, 64, latents),
        "mla_open": mla_open.macros(half, torch.float8_e4m3fn, half),
        "small_linear": small_linear.macros_of(half, torch.float32, 3),
        "rotated_linear": rotated_linear.program_macros(4 * 4 + MUL1, 9, torch.float32),
        "rotated_swiglu": rotated_linear.program_macros(4 * 4 + MUL1, 9),
    }
    for file, macros in wanted.items():
        assert any(s.path.stem == file and dict(s.macros) == dict(macros) for s in built), file


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
    assert blocks_that_fit(Resources(64, 1024, 0), 0, True, threads=512) == 2
    assert blocks_that_fit(Resources(65, 1024, 0), 0, True, threads=1024) == 0


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF\x02\x01", struct.pack("<16s2xH44x", b"\x7fELF\x02\x01", 62)]
)
def test_other_files_are_refused(data):
    with pytest.raises(OpError, match="not a cubin"):
        resources(data)
