// y = H (H (x suh) Q) svh + bias. Rows are rotated, then multiplied: up to 8 ROW_TILES with the matrix
// as it is (rotate, multiply_rows), more with tiles that are decoded once for 128 rows.
#include "activations.cuh"
#include "gemm.cuh"
#include "gemv_units.cuh"

// x [rows, K] -> rotated [rows, I], swizzled fp16. One warp for each 128 channels of a row.
extern "C" __global__ __launch_bounds__(THREADS) void rotate(const void* __restrict__ x,
                                                             const __half* __restrict__ suh,
                                                             __half* __restrict__ rotated, int rows,
                                                             int K, int I) {
  const int lane = threadIdx.x & 31, groups = I / GROUP;
  const int task = blockIdx.x * WARPS + (threadIdx.x >> 5);
  const int row = task / groups, start = task % groups * GROUP;
  const float4 scale = scales(suh + start, lane);
  take_turn();
  if (row >= rows) return;
  const void* at = reinterpret_cast<const Activation<X_TYPE>::type*>(x) + (size_t)row * K;
  const float4 v = read_four<X_TYPE>(at, start + 4 * lane, K);
  store_swizzled(rotated + (size_t)row * I + start,
                 hadamard(times(v, scale), lane), lane);
}

// partial and counters: see multiply_units.
extern "C" __global__ __launch_bounds__(THREADS, 2) void multiply_rows(
    const u32* __restrict__ words, const __half* __restrict__ rotated, const __half* __restrict__ svh,
    const float* __restrict__ bias, void* __restrict__ y, float* partial, int* counters, int rows, int I,
    int O, int N) {
  const int lane = threadIdx.x & 31;
  auto outputs_of = [&](int out) { return Outputs{words + (size_t)out * (I / 16) * (32 * RATE), rotated}; };
  auto write = [&](int out, int row, float4 sum) {
    const int start = out * GROUP;
    sum = times(sum, scales(svh + start, lane));
    if (bias) {
      const float4 b = read_four<FLOAT32>(bias, start + 4 * lane, N);
      sum.x += b.x, sum.y += b.y, sum.z += b.z, sum.w += b.w;
    }
    void* at = reinterpret_cast<Activation<X_TYPE>::type*>(y) + (size_t)row * N;
    write_four<X_TYPE>(at, start + 4 * lane, N, sum);
  };
  multiply_units<RATE, CODEBOOK, ROW_TILES>(outputs_of, write, partial, counters, rows, I, O / GROUP);
}

// The same rotation, rows laid out by eight; rows up to the next multiple of eight are zero.
extern "C" __global__ __launch_bounds__(THREADS) void rotate_by_eight(const void* __restrict__ x,
                                                                      const __half* __restrict__ suh,
                                                                      __half* __restrict__ rotated, int rows,
                                                                      int K, int I) {
  const int lane = threadIdx.x & 31, groups = I / GROUP;
  const long long task = (long long)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const int row = task / groups, start = task % groups * GROUP;
  take_turn();
  if (row >= (rows + 7) / 8 * 8) return;
  float4 v = make_float4(0, 0, 0, 0);
  if (row < rows) {
    const void* at = reinterpret_cast<const Activation<X_TYPE>::type*>(x) + (size_t)row * K;
    v = hadamard(times(read_four<X_TYPE>(at, start + 4 * lane, K), scales(suh + start, lane)), lane);
  }
  store_by_eight(rotated, row, start, I, v, lane);
}

// 128 rows and 128 outputs a block.
extern "C" __global__ __launch_bounds__(THREADS, 2) void multiply_many(
    const u32* __restrict__ words, const __half* __restrict__ rotated, const __half* __restrict__ svh,
    const float* __restrict__ bias, void* __restrict__ y, int rows, int I, int O, int N) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x & 31, groups = O / GROUP, out = blockIdx.x % groups, start = out * GROUP;
  const int first = blockIdx.x / groups * BLOCK_ROWS, here = min(BLOCK_ROWS, rows - first);
  take_turn();
  float acc[2][8][4] = {};
  multiply_block<RATE, CODEBOOK>(acc, shared, words + (size_t)out * (I / 16) * (32 * RATE),
                                 rotated + place_by_eight(first, 0, I), (here + 7) / 8, I / 16);
  const float4 scale = scales(svh + start, lane);
  each_row(acc, shared, here, [&](int row, float4 v) {
    v = times(v, scale);
    if (bias) {
      const float4 b = read_four<FLOAT32>(bias, start + 4 * lane, N);
      v.x += b.x, v.y += b.y, v.z += b.z, v.w += b.w;
    }
    void* at = reinterpret_cast<Activation<X_TYPE>::type*>(y) + (size_t)(first + row) * N;
    write_four<X_TYPE>(at, start + 4 * lane, N, v);
  });
}
