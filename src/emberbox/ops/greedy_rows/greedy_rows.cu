// The first index of the largest value of each row, and whether a row holds finite values alone.
// X_TYPE: 0 float32, 2 bfloat16 (activations.cuh).
#include "activations.cuh"
#include "gemv.cuh"

typedef unsigned long long u64;
typedef Activation<X_TYPE> Logit;
constexpr int AHEAD = 4;  // loads of a thread that are on their way at once
// A number in order: above it no finite value lies. So one maximum says both.
constexpr u32 NOT_FINITE = 0xffffffffu;

// Larger for a larger value, then for a lower index.
__device__ __forceinline__ u64 ranked(float value, int index) {
  u32 bits = __float_as_uint(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return (u64)NOT_FINITE << 32 | ~(u32)index;
  if (bits << 1 == 0) bits = 0;  // the two zeros are equal
  const u32 order = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (u64)order << 32 | ~(u32)index;
}

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

__device__ __forceinline__ u64 largest_of_warp(u64 best) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) best = larger(best, __shfl_xor_sync(ALL, best, bit));
  return best;
}

// Block b takes every `pieces`-th run of THREADS values of row b / pieces. partial [blocks].
extern "C" __global__ __launch_bounds__(THREADS) void greedy(
    const void* __restrict__ logits, long long* __restrict__ best, unsigned char* __restrict__ is_finite,
    u64* __restrict__ partial, int* __restrict__ arrived, int pieces, int size) {
  __shared__ u64 of_warps[WARPS];
  const int row = blockIdx.x / pieces, piece = blockIdx.x % pieces;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const auto* x = reinterpret_cast<const Logit::type*>(logits) + (size_t)row * size;
  take_turn();
  u64 most = 0;  // below every value
  for (int start = piece * THREADS + threadIdx.x; start < size; start += AHEAD * pieces * THREADS) {
    float v[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int at = start + i * pieces * THREADS;
      v[i] = at < size ? Logit::read(x[at]) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int at = start + i * pieces * THREADS;
      if (at < size) most = larger(most, ranked(v[i], at));
    }
  }
  most = largest_of_warp(most);
  if (lane == 0) of_warps[warp] = most;
  __syncthreads();
  if (warp != 0) return;
  most = largest_of_warp(lane < WARPS ? of_warps[lane] : 0);
  if (lane == 0) __stcg(partial + blockIdx.x, most);
  if (!is_last(arrived + row, pieces, lane)) return;
  most = 0;
  for (int i = lane; i < pieces; i += 32) most = larger(most, __ldcg(partial + row * pieces + i));
  most = largest_of_warp(most);
  if (lane == 0) {
    best[row] = (int)~(u32)most;
    is_finite[row] = (u32)(most >> 32) != NOT_FINITE;
  }
}
