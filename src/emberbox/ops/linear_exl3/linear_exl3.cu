// y = H (H (x suh) Q) svh + bias. Rows are rotated, then multiplied: up to 8 ROW_TILES with the matrix
// as it is (rotate, multiply_rows), more with tiles that are decoded once for 128 rows.
#include "activations.cuh"
#include "gemm.cuh"

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

// Units of 128 inputs x 128 outputs, the inputs running fastest, are dealt to the blocks in equal
// contiguous runs. Outputs whose units lie in several blocks are added up by the last of them,
// always in the same order. partial [2 blocks, rows, 128], counters [O / 128, rows] zero.
extern "C" __global__ __launch_bounds__(THREADS, 2) void multiply_rows(
    const u32* __restrict__ words, const __half* __restrict__ rotated, const __half* __restrict__ svh,
    const float* __restrict__ bias, void* __restrict__ y, float* partial, int* counters, int rows, int I,
    int O, int N) {
  __shared__ float red[WARPS * ROWS * GROUP];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int groups = I / GROUP, units = O / GROUP * groups, blocks = gridDim.x;
  auto begin_of = [&](u32 b) { return (int)((u32)units * b / (u32)blocks); };  // below 2^32
  auto block_of = [&](u32 u) { return (int)(((u + 1) * (u32)blocks - 1) / (u32)units); };
  const int begin = begin_of(blockIdx.x), end = begin_of(blockIdx.x + 1);
  for (int unit = begin; unit < end;) {
    const int out = unit / groups, from = unit - out * groups;
    const int to = min(groups, from + end - unit);
    float acc[ROW_TILES][TILES][4] = {};
    const __half* x[ROW_TILES];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      const int row = r * ROWS + (lane >> 2);
      x[r] = row < rows ? rotated + (size_t)row * I + 4 * (lane & 3) : nullptr;
    }
    multiply<RATE, CODEBOOK, ROW_TILES>(acc, words + (size_t)out * (I / 16) * (32 * RATE), x,
                                    from * TILES + warp, WARPS, to - from);
    const int start = out * GROUP, first = block_of(out * groups), last = block_of((out + 1) * groups - 1);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      const int row = r * ROWS + warp;
      __syncthreads();  // shared memory may still be read from before
      spread(red, acc[r], rows - r * ROWS);
      __syncthreads();
      if (row >= rows) continue;
      float4 sum = gather(red, warp, lane);
      if (first != last) {
        auto place = [&](int b) {  // a block has a beginning and an end that others share
          const int slot = 2 * b + (begin_of(b) < out * groups);
          return partial + ((size_t)slot * rows + row) * GROUP;
        };
        reinterpret_cast<float4*>(place(blockIdx.x))[lane] = sum;
        if (!is_last(counters + out * rows + row, last - first + 1, lane)) continue;
        sum = sum_written([&](int i) { return place(first + i); }, last - first + 1, lane);
      }
      sum = times(hadamard(sum, lane), scales(svh + start, lane));
      if (bias) {
        const float4 b = read_four<FLOAT32>(bias, start + 4 * lane, N);
        sum.x += b.x, sum.y += b.y, sum.z += b.z, sum.w += b.w;
      }
      void* at = reinterpret_cast<Activation<X_TYPE>::type*>(y) + (size_t)row * N;
      write_four<X_TYPE>(at, start + 4 * lane, N, sum);
    }
    unit += to - from;
  }
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
