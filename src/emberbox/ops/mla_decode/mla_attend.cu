// Latent attention, the second of three kernels: absorbed queries over the rows that each has chosen, 16
// heads and a run of rows a block. Shapes are macros: HEADS, LATENT; and X_TYPE of activations, FP8
// (1: latents are e4m3 with a scale for each 128 channels).
#include "activations.cuh"
#include "gemv.cuh"

typedef Activation<X_TYPE>::type Number;
constexpr int CHUNKS = LATENT / GROUP;
constexpr int TILE_HEADS = 16, HEAD_GROUPS = (HEADS + TILE_HEADS - 1) / TILE_HEADS;
constexpr float LOWEST = -3.4e38f;

__device__ __forceinline__ void store_four(float* at, float4 v) { *reinterpret_cast<float4*>(at) = v; }
__device__ __forceinline__ void store_four(__nv_bfloat16* at, float4 v) {
  __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
  *reinterpret_cast<uint2*>(at) = *reinterpret_cast<uint2*>(pair);
}

__device__ __forceinline__ void copy_16(void* shared, const void* global) {
  const u32 at = (u32)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(global) : "memory");
}
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit numbers; lanes 8 i .. 8 i + 7 hold the places of matrix i's rows.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* row) {
  const u32 at = (u32)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], const void* row) {
  const u32 at = (u32)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void multiply_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Shared memory of a block, and its two products. Rows of a tile lie STRIDE numbers apart.
template <int TYPE>
struct Tile;

// Tensor instructions. A warp has 8 rows of the logits, LATENT / 8 channels of the result.
template <>
struct Tile<BFLOAT16> {
  static constexpr int ROWS = 64, STRIDE = LATENT + 8, SHARE_STRIDE = ROWS + 8, LOGIT_STRIDE = ROWS + 4;
  static constexpr int WIDTH = LATENT / WARPS;
  __nv_bfloat16 latents[ROWS * STRIDE], queries[TILE_HEADS * STRIDE], shares[TILE_HEADS * SHARE_STRIDE];
  float logits[TILE_HEADS * LOGIT_STRIDE], largest[TILE_HEADS], sum[TILE_HEADS], factor[TILE_HEADS];

  struct Result {
    float of[WIDTH / 8][4] = {};
  };

  __device__ __forceinline__ void score(int lane, int warp) {
    float c[2][4] = {};
    const __nv_bfloat16* q = queries + (lane & 15) * STRIDE + lane / 16 * 8;
    const __nv_bfloat16* k = latents + (warp * 8 + (lane & 7)) * STRIDE + lane / 8 * 8;
#pragma unroll 4
    for (int start = 0; start < LATENT; start += 32) {
      u32 b[4];
      load_matrices(b, k + start);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 a[4];
        load_matrices(a, q + start + 16 * half);
        multiply_bf16(c[half], a, b[2 * half], b[2 * half + 1]);
      }
    }
    float* at = logits + lane / 4 * LOGIT_STRIDE + warp * 8 + 2 * (lane & 3);
    at[0] = c[0][0] + c[1][0], at[1] = c[0][1] + c[1][1];
    at += 8 * LOGIT_STRIDE;
    at[0] = c[0][2] + c[1][2], at[1] = c[0][3] + c[1][3];
  }

  __device__ __forceinline__ void add(Result& result, int lane, int warp) {
    const float low = factor[lane / 4], high = factor[lane / 4 + 8];
#pragma unroll
    for (auto& c : result.of) c[0] *= low, c[1] *= low, c[2] *= high, c[3] *= high;
    const __nv_bfloat16* v = latents + (lane & 15) * STRIDE + warp * WIDTH + lane / 16 * 8;
#pragma unroll
    for (int start = 0; start < ROWS; start += 16) {
      u32 a[4];
      load_matrices(a, shares + (lane & 15) * SHARE_STRIDE + start + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < WIDTH / 8; n += 2) {
        u32 b[4];
        load_transposed(b, v + start * STRIDE + n * 8);
        multiply_bf16(result.of[n], a, b[0], b[1]);
        multiply_bf16(result.of[n + 1], a, b[2], b[3]);
      }
    }
  }

  // Place: head of the group -> its row of the result.
  template <typename Place>
  __device__ __forceinline__ void write(const Result& result, Place place, int heads, int lane, int warp) {
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int head = lane / 4 + 8 * half;
        if (head < heads)
          *reinterpret_cast<float2*>(place(head) + warp * WIDTH + n * 8 + 2 * (lane & 3)) =
              make_float2(result.of[n][2 * half], result.of[n][2 * half + 1]);
      }
  }
};

// Plain float32: a thread has one head and row of the logits, whole columns of the result.
template <>
struct Tile<FLOAT32> {
  static constexpr int ROWS = 16, STRIDE = LATENT + 4, SHARE_STRIDE = ROWS, LOGIT_STRIDE = ROWS;
  static constexpr int COLUMNS = (LATENT + THREADS - 1) / THREADS;
  float latents[ROWS * STRIDE], queries[TILE_HEADS * STRIDE], shares[TILE_HEADS * SHARE_STRIDE];
  float logits[TILE_HEADS * LOGIT_STRIDE], largest[TILE_HEADS], sum[TILE_HEADS], factor[TILE_HEADS];

  struct Result {
    float of[COLUMNS][TILE_HEADS] = {};
  };

  __device__ __forceinline__ void score(int, int) {
    const int head = threadIdx.x / ROWS, row = threadIdx.x % ROWS;
    float dot = 0;
    for (int c = 0; c < LATENT; c++) dot += queries[head * STRIDE + c] * latents[row * STRIDE + c];
    logits[head * LOGIT_STRIDE + row] = dot;
  }

  __device__ __forceinline__ void add(Result& result, int, int) {
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
      const int c = threadIdx.x + j * THREADS;
      if (c >= LATENT) continue;
#pragma unroll
      for (int h = 0; h < TILE_HEADS; h++) {
        float sum_of = result.of[j][h] * factor[h];
        for (int row = 0; row < ROWS; row++)
          sum_of += shares[h * SHARE_STRIDE + row] * latents[row * STRIDE + c];
        result.of[j][h] = sum_of;
      }
    }
  }

  template <typename Place>
  __device__ __forceinline__ void write(const Result& result, Place place, int heads, int, int) {
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
      const int c = threadIdx.x + j * THREADS;
#pragma unroll
      for (int h = 0; h < TILE_HEADS; h++)
        if (c < LATENT && h < heads) place(h)[c] = result.of[j][h];
    }
  }
};

typedef Tile<X_TYPE> Own;

// Four e4m3 numbers. The bits of one, moved to where float16 has them, are its value times 2^-8.
__device__ __forceinline__ float4 values_of_fp8(u32 codes, float scale) {
  float f[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 code = codes >> (8 * i) & 0xff;
    f[i] = __half2float(__ushort_as_half((unsigned short)((code & 0x80) << 8 | (code & 0x7f) << 7))) * 256.f;
    f[i] *= scale;
  }
  return make_float4(f[0], f[1], f[2], f[3]);
}

// Rows places[0] .. of a tile to shared memory; those from `count` on are zero.
__device__ __forceinline__ void load_rows(Own& own, const void* __restrict__ latents,
                                          const float* __restrict__ scales, const int* __restrict__ places,
                                          int count, int lane, int warp) {
  constexpr int EACH = Own::ROWS / WARPS;  // rows of a warp
  constexpr int AHEAD = FP8 && EACH > 4 ? 4 : EACH;
  const int first = warp * EACH;
  const int held = lane < EACH && first + lane < count ? places[first + lane] : -1;
#pragma unroll(AHEAD)
  for (int i = 0; i < EACH; i++) {
    const int place = __shfl_sync(ALL, held, i);
    Number* row = own.latents + (first + i) * Own::STRIDE;
    if constexpr (FP8) {
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        float4 v = make_float4(0, 0, 0, 0);
        if (place >= 0) {
          const u32* codes = reinterpret_cast<const u32*>(latents) + (size_t)place * (LATENT / 4);
          v = values_of_fp8(codes[chunk * 32 + lane], scales[(size_t)place * CHUNKS + chunk]);
        }
        store_four(row + chunk * GROUP + 4 * lane, v);
      }
    } else {
      constexpr int PIECE = 16 / sizeof(Number);
      const Number* from = reinterpret_cast<const Number*>(latents) + (size_t)max(place, 0) * LATENT;
      for (int c = lane * PIECE; c < LATENT; c += 32 * PIECE)
        if (place >= 0)
          copy_16(row + c, from + c);
        else
          *reinterpret_cast<uint4*>(row + c) = make_uint4(0, 0, 0, 0);
    }
  }
}

// Logits of a tile to shares exp2(logit - largest), which is that of all tiles so far; 16 lanes a head.
__device__ __forceinline__ void share_out(Own& own, int count, int lane, int warp) {
  constexpr int EACH = Own::ROWS / 16;
  const int head = 2 * warp + lane / 16, place = lane & 15;
  float v[EACH], most = LOWEST, sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int row = place + 16 * i;
    v[i] = row < count ? own.logits[head * Own::LOGIT_STRIDE + row] : LOWEST;
    most = fmaxf(most, v[i]);
  }
#pragma unroll
  for (int bit = 8; bit; bit /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, bit));
  const float before = own.largest[head];
  most = fmaxf(most, before);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const Number share = Activation<X_TYPE>::write(exp2f(v[i] - most));
    own.shares[head * Own::SHARE_STRIDE + place + 16 * i] = share;
    sum += Activation<X_TYPE>::read(share);
  }
#pragma unroll
  for (int bit = 8; bit; bit /= 2) sum += __shfl_xor_sync(ALL, sum, bit);
  __syncwarp();
  if (place == 0) {
    const float factor = exp2f(before - most);
    own.largest[head] = most, own.factor[head] = factor, own.sum[head] = own.sum[head] * factor + sum;
  }
}

// Rows of the cache and the choice of them were written before absorb began: they are read ahead.
// partial [T, HEADS, runs, LATENT], sums [T, HEADS, runs] of (largest logit, sum of shares).
extern "C" __global__ __launch_bounds__(THREADS, 2) void attend(
    const Number* __restrict__ absorbed, const void* __restrict__ latents, const float* __restrict__ scales,
    const int* __restrict__ chosen, const int* __restrict__ num, float* __restrict__ partial,
    float2* __restrict__ sums, int K, int runs, int run_rows) {
  extern __shared__ __align__(16) unsigned char shared[];
  Own& own = *reinterpret_cast<Own*>(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int run = blockIdx.x % runs, group = blockIdx.x / runs % HEAD_GROUPS;
  const int t = blockIdx.x / (runs * HEAD_GROUPS), heads = min(TILE_HEADS, HEADS - group * TILE_HEADS);
  const int begin = run * run_rows, end = min(min(num[t], K), begin + run_rows);
  if (begin >= end) {
    take_turn();
    return;
  }
  const int* places = chosen + (size_t)t * K;
  load_rows(own, latents, scales, places + begin, end - begin, lane, warp);
  if (threadIdx.x < TILE_HEADS) own.largest[threadIdx.x] = LOWEST, own.sum[threadIdx.x] = 0;
  take_turn();
  const Number* q = absorbed + ((size_t)t * HEADS + group * TILE_HEADS) * LATENT;
  constexpr int PIECE = 16 / sizeof(Number);
  for (int i = threadIdx.x * PIECE; i < TILE_HEADS * LATENT; i += THREADS * PIECE) {
    Number* at = own.queries + i / LATENT * Own::STRIDE + i % LATENT;
    if (i / LATENT < heads)
      copy_16(at, q + i);
    else
      *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
  }
  Own::Result result;
#pragma unroll 1
  for (int at = begin; at < end; at += Own::ROWS) {
    if (at > begin) {
      __syncthreads();  // the tile before is still read from
      load_rows(own, latents, scales, places + at, end - at, lane, warp);
    }
    await_copies();
    __syncthreads();
    own.score(lane, warp);
    __syncthreads();
    share_out(own, end - at, lane, warp);
    __syncthreads();
    own.add(result, lane, warp);
  }
  const size_t first = ((size_t)t * HEADS + group * TILE_HEADS) * runs + run;
  own.write(result, [&](int head) { return partial + (first + (size_t)head * runs) * LATENT; }, heads, lane,
            warp);
  if (threadIdx.x < heads)
    sums[first + threadIdx.x * runs] = make_float2(own.largest[threadIdx.x], own.sum[threadIdx.x]);
}
