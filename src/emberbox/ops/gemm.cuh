// The product of up to 128 rows with 128 outputs of a prepared EXL3 matrix, by one block of 8 warps:
// tiles are decoded once into shared memory, in the order in which tensor instructions read them,
// between the products of the stage before. Words and rows arrive by asynchronous copies.
#pragma once
#include "gemv.cuh"

#ifndef STEP  // k-tiles of a stage: 4 where a multiprocessor has memory for two such blocks, else 2
#define STEP 2
#endif
constexpr int OWN_TILES = STEP * TILES / WARPS;  // that a warp decodes, side by side
constexpr int BLOCK_ROWS = 128;   // of a block, in row blocks of eight
constexpr int HALF_BLOCKS = 8;    // row blocks of a warp
constexpr int PIECE = 256;        // bytes of a row block in one k-tile
constexpr int CODES_BYTES = STEP * TILES * 512;
constexpr int ROWS_BYTES = BLOCK_ROWS / ROWS * STEP * PIECE;
constexpr int CODES_STAGES = 2, ROWS_STAGES = 3;
constexpr int WORDS_AT = CODES_STAGES * CODES_BYTES + ROWS_STAGES * ROWS_BYTES;
constexpr int PAD = 4;
// Shared memory of a block: that and the words of some stages, 24 KiB STEP at most; afterwards sums
// of 64 rows, [64][128 + PAD].

// Where the k-tile of a channel lies for a row, in rows laid out by eight:
// [row / 8][k-tile][row % 8][4 quads][4].
__device__ __forceinline__ size_t place_by_eight(int row, int channel, int I) {
  return ((size_t)(row / ROWS) * (I / 16) + channel / 16) * 128 + row % ROWS * 16;
}

// Channels 4 lane .. 4 lane + 3 of a group that begins at `start`.
__device__ __forceinline__ void store_by_eight(__half* rows, int row, int start, int I, float4 v, int lane) {
  __half* tile = rows + place_by_eight(row, start + lane / 4 * 16, I);
  store_swizzled(tile - lane / 4 * 16, v, lane);
}

__device__ __forceinline__ void copy_16(void* shared, const void* global) {
  const u32 at = (u32)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(global) : "memory");
}

// The own bits of this lane in neighbouring tiles, from `tile` on, out of the words of a k-tile in
// shared memory. Same tile in all lanes.
template <int TWO_K, int N>
__device__ __forceinline__ void own_words(const u32* words, int tile, int lane, u32 (&out)[N]) {
  constexpr int quads = TWO_K / 4, pair = TWO_K % 4 / 2;
  const int bit = tile * Rate<TWO_K>::own, first = bit / 32;
  auto word = [&](int j) {
    j = min(j, TWO_K - 1);
    const int in_quads = j / 4 * 128 + lane * 4 + j % 4, rest = j - 4 * quads;
    const int in_rest = 128 * quads + (rest < 2 * pair ? lane * 2 + rest : 64 * pair + lane);
    return words[j < 4 * quads ? in_quads : in_rest];
  };
  u32 before = word(first);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const u32 next = word(first + i + 1);
    out[i] = __funnelshift_l(next, before, bit % 32);
    before = next;
  }
}

// acc[2][8][4] of warp w: outputs 32 (w % 4) + 16 {0, 1}, rows 64 (w / 4) + 8 {0 .. 7}.
// rows_at: first row block, at k-tile 0. row_blocks: how many are there; others hold anything, which
// stays in rows that nobody reads.
template <int TWO_K, int BOOK>
__device__ __forceinline__ void multiply_block(float (&acc)[2][8][4], unsigned char* shared,
                                               const u32* __restrict__ words_at,
                                               const __half* __restrict__ rows_at, int row_blocks, int KT) {
  constexpr int words_bytes = STEP * 128 * TWO_K, words_stages = TWO_K <= 8 ? 4 : 2;
  constexpr int num_words = (OWN_TILES * Rate<TWO_K>::own + 31) / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  unsigned char* codes = shared;
  unsigned char* rows = shared + CODES_STAGES * CODES_BYTES;
  unsigned char* words = shared + WORDS_AT;
  const int stages = KT / STEP, decoded = warp * OWN_TILES / TILES, tile = warp * OWN_TILES % TILES;
  const int blocks_here = row_blocks - warp / 4 * HALF_BLOCKS;
  auto copy_rows = [&](int stage) {
    if (stage >= stages) return;
    unsigned char* to = rows + stage % ROWS_STAGES * ROWS_BYTES;
#pragma unroll
    for (int i = 0; i < ROWS_BYTES / 16 / THREADS; i++) {
      const int piece = i * THREADS + threadIdx.x, row_block = piece / (STEP * PIECE / 16);
      if (row_block < row_blocks)
        copy_16(to + piece * 16, reinterpret_cast<const unsigned char*>(rows_at) +
                                     ((size_t)row_block * KT + stage * STEP) * PIECE +
                                     piece % (STEP * PIECE / 16) * 16);
    }
  };
  auto copy_words = [&](int stage) {
    if (stage >= stages) return;
    const unsigned char* from = reinterpret_cast<const unsigned char*>(words_at) + (size_t)stage * words_bytes;
    for (int at = threadIdx.x * 16; at < words_bytes; at += THREADS * 16)
      copy_16(words + stage % words_stages * words_bytes + at, from + at);
  };
  auto commit = [] { asm volatile("cp.async.commit_group;" ::: "memory"); };
  auto decode = [&](int stage) {  // this warp's tiles of it
    u32 own[num_words];
    own_words<TWO_K>(reinterpret_cast<const u32*>(words + stage % words_stages * words_bytes) +
                             decoded * 32 * TWO_K, tile, lane, own);
    uint4* to = reinterpret_cast<uint4*>(codes + stage % CODES_STAGES * CODES_BYTES) +
                (decoded * TILES + tile) * 32 + lane;
#pragma unroll
    for (int t = 0; t < OWN_TILES; t++) {
      u32 a[4];
      operand<TWO_K, BOOK>(bits_of_tile<TWO_K>(own, t, lane), a);
      to[32 * t] = make_uint4(a[0], a[1], a[2], a[3]);
    }
  };
#pragma unroll
  for (int s = 0; s < words_stages; s++) copy_words(s);
  copy_rows(0), commit(), copy_rows(1), commit();
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncthreads();
  decode(0);
  __syncthreads();
  for (int stage = 0; stage < stages; stage++) {
    copy_rows(stage + 2), copy_words(stage + words_stages), commit();
    if (stage + 1 < stages) decode(stage + 1);
    const uint4* a_at = reinterpret_cast<const uint4*>(codes + stage % CODES_STAGES * CODES_BYTES);
    const uint2* b_at = reinterpret_cast<const uint2*>(rows + stage % ROWS_STAGES * ROWS_BYTES);
    if (blocks_here > 0)
#pragma unroll
      for (int k = 0; k < STEP; k++) {
        u32 a[2][4];
#pragma unroll
        for (int o = 0; o < 2; o++) {
          const uint4 v = a_at[(k * TILES + warp % 4 * 2 + o) * 32 + lane];
          a[o][0] = v.x, a[o][1] = v.y, a[o][2] = v.z, a[o][3] = v.w;
        }
#pragma unroll
        for (int n = 0; n < HALF_BLOCKS; n++)
          if (n < 2 || n < blocks_here) {
            const uint2 b = b_at[((warp / 4 * HALF_BLOCKS + n) * STEP + k) * 32 + lane];
            multiply_add(acc[0][n], a[0], b);
            multiply_add(acc[1][n], a[1], b);
          }
      }
    if constexpr (words_stages > 2)
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    else
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
  }
}

// Rows of the block in turn, channels 4 lane .. 4 lane + 3 after Hadamard transform: finish(row, v).
template <typename Finish>
__device__ __forceinline__ void each_row(const float (&acc)[2][8][4], unsigned char* shared, int rows,
                                         Finish finish) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float* red = reinterpret_cast<float*>(shared);
  for (int part = 0; part < 2 && 64 * part < rows; part++) {
    if (part) __syncthreads();
    if (warp / 4 == part)
#pragma unroll
      for (int o = 0; o < 2; o++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
          for (int j = 0; j < 4; j++)
            red[(n * 8 + 2 * (lane & 3) + (j & 1)) * (GROUP + PAD) + warp % 4 * 32 + o * 16 + (lane >> 2) +
                (j & 2) * 4] = acc[o][n][j];
    __syncthreads();
    for (int r = warp; r < min(64, rows - 64 * part); r += WARPS) {
      const float4 v = reinterpret_cast<const float4*>(red + r * (GROUP + PAD))[lane];
      finish(64 * part + r, hadamard(v, lane));
    }
  }
}
