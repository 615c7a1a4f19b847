// The product of up to 8 ROW_TILES rotated rows with whole matrices of one kind, by all blocks.
#pragma once
#include "gemv.cuh"

// Where the words of 128 outputs begin, and row 0 of what they are multiplied with.
struct Outputs {
  const u32* words;
  const __half* rotated;
};

// Units of 128 inputs x 128 outputs, the inputs running fastest, are dealt to the blocks in equal
// contiguous runs. Outputs whose units lie in several blocks are added up by the last of them,
// always in the same order. partial [2 blocks, rows, 128], counters [output groups, rows] zero.
// outputs_of(group) finds what is multiplied; write(group, row, sum) has a warp's lanes hand on the
// sums of a row, rotated back: channels 4 lane .. 4 lane + 3 each.
template <int TWO_K, int BOOK, int RT, typename Find, typename Write>
__device__ __forceinline__ void multiply_units(Find outputs_of, Write write, float* partial, int* counters,
                                               int rows, int I, int output_groups) {
  __shared__ float red[WARPS * ROWS * GROUP];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int groups = I / GROUP, units = output_groups * groups, blocks = gridDim.x;
  auto begin_of = [&](u32 b) { return (int)((u32)units * b / (u32)blocks); };  // below 2^32
  auto block_of = [&](u32 u) { return (int)(((u + 1) * (u32)blocks - 1) / (u32)units); };
  const int begin = begin_of(blockIdx.x), end = begin_of(blockIdx.x + 1);
  for (int unit = begin; unit < end;) {
    const int out = unit / groups, from = unit - out * groups;
    const int to = min(groups, from + end - unit);
    const Outputs at = outputs_of(out);
    float acc[RT][TILES][4] = {};
    const __half* x[RT];
#pragma unroll
    for (int r = 0; r < RT; r++) {
      const int row = r * ROWS + (lane >> 2);
      x[r] = row < rows ? at.rotated + (size_t)row * I + 4 * (lane & 3) : nullptr;
    }
    multiply<TWO_K, BOOK, RT>(acc, at.words, x, from * TILES + warp, WARPS, to - from);
    const int first = block_of(out * groups), last = block_of((out + 1) * groups - 1);
#pragma unroll
    for (int r = 0; r < RT; r++) {
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
      write(out, row, hadamard(sum, lane));
    }
    unit += to - from;
  }
}
