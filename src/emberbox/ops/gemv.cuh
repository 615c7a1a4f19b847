// The product of up to 8 or 16 rows with 128 outputs of a prepared EXL3 matrix, by one block of 8
// warps that divide the inputs among them. Rows are rotated and swizzled before (rotate_row).
#pragma once
#include "trellis.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int GROUP = 128;  // channels of one Hadamard transform
constexpr int TILES = 8;    // of a group
constexpr int ROWS = 8;     // of one tensor instruction
constexpr float HALF_MAX = 65504.f;

// Words of one lane, as loads of 16, then 8, then 4 bytes; a warp's loads are contiguous.
template <int TWO_K>
__device__ __forceinline__ void load_words(const u32* __restrict__ at, int lane, u32 (&w)[TWO_K]) {
  constexpr int quads = TWO_K / 4, pair = TWO_K % 4 / 2, one = TWO_K % 2;
#pragma unroll
  for (int q = 0; q < quads; q++) {
    const uint4 v = __ldcs(reinterpret_cast<const uint4*>(at + 128 * q) + lane);
    w[4 * q] = v.x, w[4 * q + 1] = v.y, w[4 * q + 2] = v.z, w[4 * q + 3] = v.w;
  }
  if constexpr (pair) {
    const uint2 v = __ldcs(reinterpret_cast<const uint2*>(at + 128 * quads) + lane);
    w[4 * quads] = v.x, w[4 * quads + 1] = v.y;
  }
  if constexpr (one) w[TWO_K - 1] = __ldcs(at + 128 * quads + 64 * pair + lane);
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], uint2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// Where the architecture lets a kernel start before the one before it has ended: wait until that has
// and its results can be seen, then let the next one start. Only what no kernel writes (weights) and
// what was written two kernels ago may be read before. Every block takes its turn, even one that has
// nothing to do: the end of a kernel says that those before it have ended.
__device__ __forceinline__ void take_turn() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What a lane has fetched ahead: its words of D k-tiles, and its four inputs of each row.
template <int TWO_K, int RT>
struct Stream {
  static constexpr int depth = RT * TWO_K <= 5 ? 4 : TWO_K <= 8 ? 2 : 1;
  const u32* words;            // of k-tile 0
  const __half* const (&x)[RT];  // this lane's row at k-tile 0, or null where there is none
  int first, step, lane;
  u32 w[depth][TWO_K];
  uint2 b[depth][RT];

  __device__ __forceinline__ void fetch_words(int slot, int i) {
    load_words<TWO_K>(words + (size_t)(first + i * step) * (32 * TWO_K), lane, w[slot]);
  }
  __device__ __forceinline__ void fetch_rows(int slot, int i) {
#pragma unroll
    for (int r = 0; r < RT; r++)
      b[slot][r] = x[r] ? *reinterpret_cast<const uint2*>(x[r] + (first + i * step) * 16) : make_uint2(0, 0);
  }
  __device__ __forceinline__ void fetch(int slot, int i) { fetch_words(slot, i), fetch_rows(slot, i); }
};

template <int TWO_K, int BOOK, int RT>
__device__ __forceinline__ void multiply_tile(float (&acc)[RT][TILES][4], const u32 (&words)[TWO_K],
                                              const uint2 (&rows)[RT], int lane) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    u32 a[4];
    operand<TWO_K, BOOK>(bits_of_tile<TWO_K>(words, t, lane), a);
#pragma unroll
    for (int r = 0; r < RT; r++) multiply_add(acc[r][t], a, rows[r]);
  }
}

// acc[row tile][tile][4] += tiles x rows over the k-tiles first, first + step, ... (count of them).
// Rows are read when it is this kernel's turn, words before.
template <int TWO_K, int BOOK, int RT>
__device__ __forceinline__ void multiply(float (&acc)[RT][TILES][4], const u32* __restrict__ words,
                                         const __half* const (&x)[RT], int first, int step, int count) {
  constexpr int D = Stream<TWO_K, RT>::depth;
  Stream<TWO_K, RT> s{words, x, first, step, (int)threadIdx.x & 31};
#pragma unroll
  for (int d = 0; d < D; d++)
    if (d < count) s.fetch_words(d, d);
  take_turn();
#pragma unroll
  for (int d = 0; d < D; d++)
    if (d < count) s.fetch_rows(d, d);
  int i = 0;
  for (; i + 2 * D <= count; i += D)  // without a branch inside: faster
#pragma unroll
    for (int d = 0; d < D; d++) {
      u32 now[TWO_K];
      uint2 rows[RT];
#pragma unroll
      for (int q = 0; q < TWO_K; q++) now[q] = s.w[d][q];
#pragma unroll
      for (int r = 0; r < RT; r++) rows[r] = s.b[d][r];
      s.fetch(d, i + d + D);
      multiply_tile<TWO_K, BOOK, RT>(acc, now, rows, s.lane);
    }
#pragma unroll 1
  for (; i < count; i += D)
#pragma unroll
    for (int d = 0; d < D; d++)
      if (i + d < count) {
        u32 now[TWO_K];
        uint2 rows[RT];
#pragma unroll
        for (int q = 0; q < TWO_K; q++) now[q] = s.w[d][q];
#pragma unroll
        for (int r = 0; r < RT; r++) rows[r] = s.b[d][r];
        if (i + d + D < count) s.fetch(d, i + d + D);
        multiply_tile<TWO_K, BOOK, RT>(acc, now, rows, s.lane);
      }
}

// What the warps of a block have of eight rows, to shared memory: red[warp][row][128].
__device__ __forceinline__ void spread(float* red, const float (&acc)[TILES][4], int rows) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, out = lane >> 2, row = 2 * (lane & 3);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int at = row + (j & 1);
    if (at < rows)
#pragma unroll
      for (int t = 0; t < TILES; t++)
        red[(warp * ROWS + at) * GROUP + t * 16 + out + (j & 2) * 4] = acc[t][j];
  }
}

// The sum over warps of channels 4 lane .. 4 lane + 3 of a row.
__device__ __forceinline__ float4 gather(const float* red, int row, int lane) {
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) {
    const float4 v = reinterpret_cast<const float4*>(red + (warp * ROWS + row) * GROUP)[lane];
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  return sum;
}

// Four neighbouring channels per lane, 128 in the warp: the orthonormal Hadamard transform.
__device__ __forceinline__ float4 hadamard(float4 v, int lane) {
  const float a = v.x + v.y, b = v.x - v.y, c = v.z + v.w, d = v.z - v.w;
  v = make_float4(a + c, b + d, a - c, b - d);
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    const float sign = lane & bit ? -1.f : 1.f;
    v.x = __shfl_xor_sync(ALL, v.x, bit) + sign * v.x;
    v.y = __shfl_xor_sync(ALL, v.y, bit) + sign * v.y;
    v.z = __shfl_xor_sync(ALL, v.z, bit) + sign * v.z;
    v.w = __shfl_xor_sync(ALL, v.w, bit) + sign * v.w;
  }
  const float scale = 0.08838834764831845f;  // 128^-1/2
  return make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
}

__device__ __forceinline__ float4 scales(const __half* at, int lane) {
  const __half2* h = reinterpret_cast<const __half2*>(at) + 2 * lane;
  const float2 a = __half22float2(h[0]), b = __half22float2(h[1]);
  return make_float4(a.x, a.y, b.x, b.y);
}

__device__ __forceinline__ float4 times(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

// Channels 4 lane .. 4 lane + 3 of a group, to their places in a swizzled row: inputs 2 t, 2 t + 1,
// 2 t + 8, 2 t + 9 of a k-tile are neighbours, so that a lane fetches its operand with one load.
__device__ __forceinline__ void store_swizzled(__half* group, float4 v, int lane) {
  __half* tile = group + lane / 4 * 16;
  const int quad = lane & 3, at = (quad & 1) * 8 + quad / 2 * 2;
  // What is not a number stays so, for whoever looks at the result.
  auto clamped = [](float f) { return f == f ? fminf(fmaxf(f, -HALF_MAX), HALF_MAX) : f; };
  *reinterpret_cast<__half2*>(tile + at) = __floats2half2_rn(clamped(v.x), clamped(v.y));
  *reinterpret_cast<__half2*>(tile + at + 4) = __floats2half2_rn(clamped(v.z), clamped(v.w));
}

// Values that other blocks wrote are read past the L1 cache.
__device__ __forceinline__ float4 load_written(const float* at, int lane) {
  return __ldcg(reinterpret_cast<const float4*>(at) + lane);
}

// The sum of `count` rows of other blocks in order; eight are on their way at a time.
template <typename Place>
__device__ __forceinline__ float4 sum_written(Place place, int count, int lane) {
  float4 sum = make_float4(0, 0, 0, 0);
  for (int start = 0; start < count; start += 8) {
    float4 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      v[i] = start + i < count ? load_written(place(start + i), lane) : make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 8; i++) sum.x += v[i].x, sum.y += v[i].y, sum.z += v[i].z, sum.w += v[i].w;
  }
  return sum;
}

// One warp reports that it has written; true for the last of `total`, which finds all written.
__device__ __forceinline__ bool is_last(int* counter, int total, int lane) {
  int before = 0;
  __syncwarp();
  if (lane == 0) {
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    if (before == total - 1) *counter = 0;  // ready for the next launch
  }
  return __shfl_sync(ALL, before, 0) == total - 1;
}
