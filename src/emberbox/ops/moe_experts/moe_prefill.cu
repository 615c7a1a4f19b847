// The routed experts of many tokens. Slots (a token and one of its experts) are sorted by expert, each
// expert's rows beginning at a multiple of eight; a block multiplies up to 128 rows of one expert.
#include "experts.cuh"
#include "gemm.cuh"

constexpr int GROUPS = 4;

struct Tile {
  int expert, first, rows;  // first: a row, multiple of eight; rows 0: nothing to do
};

// x [T, H] -> rotated rows of gate and of up [2, rows, H], by eight. slot_of [rows], -1: none.
// A warp takes GROUPS groups of 128 channels of a row, so that what leads to them is read once.
extern "C" __global__ __launch_bounds__(THREADS) void gather_and_rotate(
    const void* __restrict__ x, const Matrix* __restrict__ matrices, const long long* __restrict__ experts,
    const int* __restrict__ slot_of, __half* __restrict__ rotated, int rows, int top, int H) {
  const int lane = threadIdx.x & 31, parts = (H / GROUP + GROUPS - 1) / GROUPS;
  const long long task = (long long)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const int row = task / parts, begin = task % parts * GROUPS * GROUP;
  take_turn();
  if (row >= rows) return;
  const int slot = slot_of[row];
  const Matrix* expert = matrices + (slot < 0 ? 0 : experts[slot]) * MATRICES;
  const __half *gate = expert[0].suh, *up = expert[1].suh;
  const void* at = reinterpret_cast<const Activation<X_TYPE>::type*>(x) + (size_t)(max(slot, 0) / top) * H;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const int start = begin + g * GROUP;
    if (start >= H) break;
    const float4 v = slot < 0 ? make_float4(0, 0, 0, 0) : read_four<X_TYPE>(at, start + 4 * lane, H);
    store_by_eight(rotated, row, start, H, hadamard(times(v, scales(gate + start, lane)), lane), lane);
    store_by_eight(rotated + (size_t)rows * H, row, start, H,
                   hadamard(times(v, scales(up + start, lane)), lane), lane);
  }
}

// rotated [rows, I] by eight -> out float32: of gate and up [rows, O], of down [slots, O], weighted.
extern "C" __global__ __launch_bounds__(THREADS, 2) void multiply_tiles(
    const Matrix* __restrict__ matrices, const Tile* __restrict__ tiles, const __half* __restrict__ rotated,
    const int* __restrict__ slot_of, const float* __restrict__ slot_weights, float* __restrict__ out,
    int which, int I, int O) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x & 31, groups = O / GROUP, start = blockIdx.x % groups * GROUP;
  take_turn();
  const Tile tile = tiles[blockIdx.x / groups];
  if (tile.rows == 0) return;
  const Matrix matrix = matrices[tile.expert * MATRICES + which];
  if (matrix.kind != 4 * RATE + CODEBOOK) return;
  float acc[2][8][4] = {};
  multiply_block<RATE, CODEBOOK>(acc, shared, matrix.words + (size_t)(start / 16 / TILES) * (I / 16) * (32 * RATE),
                                 rotated + place_by_eight(tile.first, 0, I), (tile.rows + 7) / 8, I / 16);
  const float4 scale = scales(matrix.svh + start, lane);
  each_row(acc, shared, tile.rows, [&](int row, float4 v) {
    const int slot = slot_weights ? slot_of[tile.first + row] : tile.first + row;
    const float weight = slot_weights ? slot_weights[slot] : 1.f;
    v = times(times(v, scale), make_float4(weight, weight, weight, weight));
    reinterpret_cast<float4*>(out + (size_t)slot * O + start)[lane] = v;
  });
}

// gate and up [2, rows, W] -> rotated rows of down [rows, W], by eight.
extern "C" __global__ __launch_bounds__(THREADS) void activate_and_rotate(
    const Matrix* __restrict__ matrices, const long long* __restrict__ experts, const int* __restrict__ slot_of,
    const float* __restrict__ gate_up, __half* __restrict__ rotated, int rows, int W, float limit) {
  const int lane = threadIdx.x & 31, parts = (W / GROUP + GROUPS - 1) / GROUPS;
  const long long task = (long long)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const int row = task / parts, begin = task % parts * GROUPS * GROUP;
  take_turn();
  if (row >= rows) return;
  const int slot = slot_of[row];
  const __half* suh = matrices[(slot < 0 ? 0 : experts[slot]) * MATRICES + 2].suh;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const int start = begin + g * GROUP;
    if (start >= W) break;
    float4 v = make_float4(0, 0, 0, 0);
    if (slot >= 0) {
      const float4 a = reinterpret_cast<const float4*>(gate_up + (size_t)row * W + start)[lane];
      const float4 b = reinterpret_cast<const float4*>(gate_up + ((size_t)rows + row) * W + start)[lane];
      v = make_float4(activated(a.x, b.x, limit), activated(a.y, b.y, limit), activated(a.z, b.z, limit),
                      activated(a.w, b.w, limit));
    }
    store_by_eight(rotated, row, start, W, hadamard(times(v, scales(suh + start, lane)), lane), lane);
  }
}

// parts [T, k, H] -> y [T, H].
extern "C" __global__ __launch_bounds__(THREADS) void combine(const float* __restrict__ parts, void* __restrict__ y,
                                                              int tokens, int top, int H) {
  const int lane = threadIdx.x & 31, groups = H / GROUP;
  const long long task = (long long)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const int token = task / groups, start = task % groups * GROUP;
  take_turn();
  if (token >= tokens) return;
  const float4 sum =
      sum_written([&](int k) { return parts + (size_t)(token * (long long)top + k) * H + start; }, top, lane);
  void* at = reinterpret_cast<Activation<X_TYPE>::type*>(y) + (size_t)token * H;
  write_four<X_TYPE>(at, start + 4 * lane, H, sum);
}
