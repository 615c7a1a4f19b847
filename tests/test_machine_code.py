"""benchmarks/machine_code.py: which loop counts, and what is counted in it."""

import pytest

from benchmarks.machine_code import cuobjdump, inner_loop, loop_of, usage
from emberbox.errors import EnvironmentProblem
from emberbox.ops.build import Source, build, nvrtc_version

# An outer loop from 0010 to 0140 around two loops with tensor instructions, and with more.
LISTING = """
    /*0000*/                   MOV R1, c[0x0][0x28] ;        /* 0x00000a0000017a02 */
    /*0010*/                   LDG.E R4, desc[UR6][R4.64] ;  /* 0x0000000604047981 */
    /*0020*/              @!P0 BRA 0x70 ;                    /* 0x0000000000048947 */
    /*0030*/                   PRMT R3, R3, 0x5410, R4 ;     /* 0x0000541003037816 */
    /*0040*/                   LOP3.LUT R3, R3, R4, RZ, 0xc0, !PT ;  /* 0x0000000403037212 */
    /*0050*/                   HMMA.16816.F32 R4, R8, R2, R4 ;  /* 0x000000020804723c */
    /*0060*/               @P1 BRA 0x30 ;                    /* 0xffffffc000e88947 */
    /*0070*/                   LDG.E.EF.128 R8, desc[UR6][R4.64+0x10] ;  /* 0x0 */
    /*0080*/              @!P2 LDG.E.EF.64 R8, desc[UR6][R4.64] ;  /* 0x0 */
    /*0090*/                   LDG.E.64.CONSTANT R8, desc[UR6][R4.64] ;  /* 0x0 */
    /*00a0*/                   IDP.4A.U8.U8 R9, R9, R3, R2 ; /* 0x0000000309097226 */
    /*00b0*/                   HMMA.16816.F32 R4, R8, R2, R4 ;  /* 0x000000020804723c */
    /*00c0*/                   IMAD.SHL.U32 R9, R9, 0x8, RZ ;  /* 0x0000000809097824 */
    /*00d0*/                   HMMA.16816.F32 R4, R8, R2.reuse, R4 ;  /* 0x000000020804723c */
    /*00e0*/                   HMMA.16816.F32 R4, R8, R2, R4 ;  /* 0x000000020804723c */
    /*00f0*/              @!P0 BRA 0x70 ;                    /* 0xffffff8000e88947 */
    /*0100*/                   HMMA.16816.F32 R4, R8, R2, R4 ;  /* 0x000000020804723c */
    /*0110*/                   HMMA.16816.F32 R4, R8, R2, R4 ;  /* 0x000000020804723c */
    /*0120*/                   HMMA.16816.F32 R4, R8, R2, R4 ;  /* 0x000000020804723c */
    /*0130*/                   HMMA.16816.F32 R4, R8, R2, R4 ;  /* 0x000000020804723c */
    /*0140*/               @P1 BRA 0x10 ;                    /* 0xffffff0000e88947 */
    /*0150*/                   BRA 0x150;                    /* 0xfffffffc00fc7947 */
"""
KERNEL = """
extern "C" __global__ __launch_bounds__(256) void sums(unsigned *a, float *out, int count) {
  __shared__ float kept[64];
  float c[4] = {};
  for (int i = 0; i < count; i++) {
    const uint4 v = __ldcs(reinterpret_cast<const uint4*>(a) + i * 32 + threadIdx.x);
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(v.x), "r"(v.y));
  }
  kept[threadIdx.x % 64] = c[0] + c[1] + c[2] + c[3];
  __syncthreads();
  out[threadIdx.x] = kept[(threadIdx.x + 1) % 64];
}
"""


def test_the_loop_with_the_fewest_instructions_for_each_tensor_instruction():
    loop = loop_of(LISTING)
    assert loop.opcodes == {"LDG": 3, "IDP": 1, "HMMA": 3, "IMAD": 1, "BRA": 1}
    assert loop.num_instructions == 9
    assert loop.kinds() == {
        "integer": 0, "multiply": 2, "half": 0, "shuffle": 0, "tensor": 3, "load": 3, "other": 1,
    }  # fmt: skip


def test_bytes_of_weights_and_weights_of_a_pass():
    loop = loop_of(LISTING)
    assert loop.streamed_bytes_per_lane == 16 + 8  # what is not marked as read once is no weight
    assert loop.weights_per_lane(row_tiles=1) == 3 * 256 / 32
    assert loop.weights_per_lane(row_tiles=3) == 256 / 32


def test_a_listing_without_tensor_instructions_has_no_such_loop():
    assert loop_of(LISTING.replace("HMMA", "FFMA")) is None


def test_a_real_cubin_is_read(tmp_path):
    tool = cuobjdump()
    if tool is None:
        pytest.skip("there is no cuobjdump: it comes with Triton or NVIDIA's wheel")
    try:
        nvrtc_version()
        path = tmp_path / "sums.cu"
        path.write_text(KERNEL, encoding="utf-8")
        cubin = build(Source(path), "sm_90", tmp_path)
    except EnvironmentProblem as missing:
        pytest.skip(f"NVRTC or its headers are not installed: {missing.message}")
    facts = usage(tool, cubin, "sums")
    assert facts["local_bytes"] == facts["stack_bytes"] == 0
    assert 64 * 4 <= facts["shared_bytes"] <= 64 * 4 + 1024  # from sm_90 on with the system's own
    assert 8 <= facts["registers"] <= 64
    loop = inner_loop(tool, cubin, "sums")
    assert loop.streamed_bytes_per_lane == 16 * loop.opcodes["HMMA"]  # however it is unrolled
