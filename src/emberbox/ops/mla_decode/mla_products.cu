// Latent attention, the first and the last of three kernels: queries through W_K (absorb), and what the
// runs of attend have found, added up, through W_V, rotated (finish). Shapes are macros: HEADS, KEY,
// VALUE, LATENT; and the types X_TYPE of activations, W_TYPE of kv_b.
#include "activations.cuh"
#include "gemv.cuh"

typedef Activation<X_TYPE>::type Number;
constexpr int CHUNKS = LATENT / GROUP;  // of a row of kv_b, four channels of each per lane
constexpr int MAX_RUNS = 64;            // of one query's rows
constexpr float LOWEST = -3.4e38f;

// Four neighbouring weights.
template <int TYPE>
struct FourWeights {
  typedef uint2 word;
};
template <>
struct FourWeights<FLOAT32> {
  typedef float4 word;
};
typedef FourWeights<W_TYPE>::word Weights;
constexpr int WEIGHT_REGISTERS = sizeof(Weights) / 4;

__device__ __forceinline__ float4 values_of(float4 w) { return w; }
__device__ __forceinline__ float4 values_of(uint2 w) {
  if constexpr (W_TYPE == FLOAT16) {
    const float2 a = __half22float2(*reinterpret_cast<__half2*>(&w.x));
    const float2 b = __half22float2(*reinterpret_cast<__half2*>(&w.y));
    return make_float4(a.x, a.y, b.x, b.y);
  }
  return make_float4(__uint_as_float(w.x << 16), __uint_as_float(w.x & 0xffff0000u),
                     __uint_as_float(w.y << 16), __uint_as_float(w.y & 0xffff0000u));
}

constexpr int KEY_STEPS = KEY / WARPS;                    // rows of W_K that a warp takes
constexpr int MOST_STEPS = 64 / WEIGHT_REGISTERS;         // of them in registers at once
constexpr int STEPS = KEY_STEPS < MOST_STEPS ? KEY_STEPS : MOST_STEPS;

// absorbed[t][h] = scale q[t][h] W_K[h]; one head and 128 channels a block, and up to ROWS queries.
// scale holds log2 e: attend uses exp2.
template <int ROWS>
__device__ __forceinline__ void absorb(const Number* __restrict__ q, const Weights* __restrict__ kv_b,
                                       Number* __restrict__ absorbed, int T, float scale) {
  __shared__ __align__(16) float queries[KEY][ROWS];
  __shared__ float4 sums[WARPS][ROWS][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int chunk = blockIdx.x % CHUNKS, head = blockIdx.x / CHUNKS % HEADS;
  const int first = blockIdx.x / (CHUNKS * HEADS) * ROWS;
  const Weights* w = kv_b + (size_t)head * (KEY + VALUE) * (LATENT / 4) + chunk * 32 + lane;
  Weights held[STEPS];
  auto fetch = [&](int start) {
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      if (start + i < KEY_STEPS) held[i] = __ldg(w + (size_t)((start + i) * WARPS + warp) * (LATENT / 4));
  };
  fetch(0);
  take_turn();
  for (int i = threadIdx.x; i < KEY * ROWS; i += THREADS) {
    const int d = i % KEY, t = i / KEY;
    const size_t at = (size_t)(first + t) * (HEADS * KEY) + head * KEY + d;
    queries[d][t] = first + t < T ? Activation<X_TYPE>::read(q[at]) * scale : 0.f;
  }
  __syncthreads();
  float4 acc[ROWS] = {};
#pragma unroll 1
  for (int start = 0; start < KEY_STEPS; start += STEPS) {
    if (start) fetch(start);
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      if (start + i < KEY_STEPS) {
        const float4 v = values_of(held[i]);
        const float* own = queries[(start + i) * WARPS + warp];
#pragma unroll
        for (int t = 0; t < ROWS; t++) {
          acc[t].x += own[t] * v.x, acc[t].y += own[t] * v.y;
          acc[t].z += own[t] * v.z, acc[t].w += own[t] * v.w;
        }
      }
  }
#pragma unroll
  for (int t = 0; t < ROWS; t++) sums[warp][t][lane] = acc[t];
  __syncthreads();
  const int t = warp;  // ROWS <= WARPS
  if (t >= ROWS || first + t >= T) return;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int other = 0; other < WARPS; other++) {
    const float4 v = sums[other][t][lane];
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  write_four<X_TYPE>(absorbed + ((size_t)(first + t) * HEADS + head) * LATENT, chunk * GROUP + 4 * lane, LATENT,
                     sum);
}

constexpr int BLOCK_HEADS = VALUE < GROUP ? GROUP / VALUE : 1;  // that 128 outputs are of
constexpr int WARP_OUTPUTS = GROUP / WARPS;
constexpr int MOST_OUTPUTS = 32 / (CHUNKS * WEIGHT_REGISTERS);
// In registers, twice; a power of two.
constexpr int OUTPUTS = MOST_OUTPUTS >= 8 ? 8 : MOST_OUTPUTS >= 4 ? 4 : MOST_OUTPUTS >= 2 ? 2 : 1;
constexpr int PASSES = WARP_OUTPUTS / OUTPUTS;

// v[i] summed over the lanes; lane l gets that of i = l / (32 / N).
template <int N>
__device__ __forceinline__ float sum_over_lanes(float (&v)[N], int lane) {
  int bit = 16;
#pragma unroll
  for (int half = N / 2; half; half /= 2, bit /= 2) {
    const bool is_upper = lane & bit;
#pragma unroll
    for (int i = 0; i < half; i++) {
      const float given = is_upper ? v[i] : v[i + half], kept = is_upper ? v[i + half] : v[i];
      v[i] = kept + __shfl_xor_sync(ALL, given, bit);
    }
  }
#pragma unroll
  for (; bit; bit /= 2) v[0] += __shfl_xor_sync(ALL, v[0], bit);
  return v[0];
}

// share[run]: what each run of a head counts, so that their sum is the softmax's; returns how many.
__device__ __forceinline__ int weigh(float* share, const float2* __restrict__ sums, int count, int lane) {
  float2 held[MAX_RUNS / 32];
  float most = LOWEST, total = 0;
#pragma unroll
  for (int i = 0; i < MAX_RUNS / 32; i++) {
    const int run = lane + 32 * i;
    held[i] = run < count ? __ldcg(sums + run) : make_float2(LOWEST, 0);
    most = fmaxf(most, held[i].x);
  }
#pragma unroll
  for (int bit = 16; bit; bit /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, bit));
#pragma unroll
  for (int i = 0; i < MAX_RUNS / 32; i++)
    if (lane + 32 * i < count) total += held[i].y * exp2f(held[i].x - most);
#pragma unroll
  for (int bit = 16; bit; bit /= 2) total += __shfl_xor_sync(ALL, total, bit);
#pragma unroll
  for (int i = 0; i < MAX_RUNS / 32; i++)
    if (lane + 32 * i < count) share[lane + 32 * i] = exp2f(held[i].x - most) / total;
  return count;
}

template <int ROWS>
struct Mixed {
  static constexpr int PAIRS = ROWS * BLOCK_HEADS, QUADS = LATENT / 4;
  // Threads without a column of their own take every SLICES-th run of one.
  static constexpr int SLICES = PAIRS * QUADS < THREADS ? THREADS / (PAIRS * QUADS) : 1;
  float4 of[SLICES][PAIRS][QUADS];
  float share[PAIRS][MAX_RUNS];
  int count[PAIRS];

  __device__ __forceinline__ void combine(const float* __restrict__ partial, const float2* __restrict__ sums,
                                          const int* __restrict__ num, int head, int first, int T, int K,
                                          int runs, int run_rows) {
    const int lane = threadIdx.x & 31;
    auto row_of = [&](int pair) {
      return ((size_t)(first + pair / BLOCK_HEADS) * HEADS + head + pair % BLOCK_HEADS) * runs;
    };
    for (int pair = threadIdx.x / 32; pair < PAIRS; pair += WARPS) {
      const int t = first + pair / BLOCK_HEADS;
      const int rows = t < T ? max(0, min(num[t], K)) : 0, own = (rows + run_rows - 1) / run_rows;
      weigh(share[pair], sums + row_of(pair), own, lane);
      if (lane == 0) count[pair] = own;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SLICES * PAIRS * QUADS; i += THREADS) {
      const int quad = i % QUADS, pair = i / QUADS % PAIRS, slice = i / (QUADS * PAIRS);
      const int own = count[pair];
      const float4* at = reinterpret_cast<const float4*>(partial + row_of(pair) * LATENT) + quad;
      float4 sum = make_float4(0, 0, 0, 0);
      constexpr int BATCH = 6;  // on their way at a time
      for (int start = slice; start < own; start += BATCH * SLICES) {
        float4 v[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
          if (start + b * SLICES < own) v[b] = __ldcg(at + (size_t)(start + b * SLICES) * QUADS);
#pragma unroll
        for (int b = 0; b < BATCH; b++)
          if (start + b * SLICES < own) {
            const float part = share[pair][start + b * SLICES];
            sum.x += part * v[b].x, sum.y += part * v[b].y, sum.z += part * v[b].z, sum.w += part * v[b].w;
          }
      }
      of[slice][pair][quad] = sum;
    }
    __syncthreads();
  }

  __device__ __forceinline__ float4 at(int pair, int quad) const {
    float4 sum = of[0][pair][quad];
#pragma unroll
    for (int slice = 1; slice < SLICES; slice++) {
      const float4 v = of[slice][pair][quad];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    return sum;
  }
};

__device__ __forceinline__ void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// suh: null where outputs [T, HEADS VALUE] are wanted as they are, not rotated.
template <int ROWS>
__device__ __forceinline__ void finish(const float* __restrict__ partial, const float2* __restrict__ sums,
                                       const Weights* __restrict__ kv_b, const int* __restrict__ num,
                                       const __half* __restrict__ suh, void* __restrict__ out, int T, int K,
                                       int runs, int run_rows) {
  __shared__ Mixed<ROWS> mixed;
  __shared__ __align__(16) float outputs[ROWS][GROUP];
  constexpr int BLOCKS = HEADS * VALUE / GROUP;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int start = blockIdx.x % BLOCKS * GROUP, first = blockIdx.x / BLOCKS * ROWS;
  const int own = start + warp * WARP_OUTPUTS, head = start / VALUE, inner = own / VALUE - head;
  const Weights* w = kv_b + ((size_t)(head + inner) * (KEY + VALUE) + KEY + own % VALUE) * (LATENT / 4) + lane;
  Weights held[2][OUTPUTS][CHUNKS];
  auto fetch = [&](int pass) {
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++)
        held[pass & 1][o][chunk] = __ldg(w + (pass * OUTPUTS + o) * (LATENT / 4) + chunk * 32);
  };
  fetch(0);
  if (PASSES > 1) fetch(1);
  constexpr int LINE = 128 / sizeof(Weights), LINES = (PASSES - 2) * OUTPUTS * (LATENT / 4) / LINE;
  for (int i = lane; i < LINES; i += 32) prefetch(w - lane + 2 * OUTPUTS * (LATENT / 4) + i * LINE);
  float4 scale = make_float4(1, 1, 1, 1);
  if (suh) scale = scales(suh + start, lane);
  take_turn();
  mixed.combine(partial, sums, num, head, first, T, K, runs, run_rows);
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
#pragma unroll 1
    for (int t = 0; t < ROWS; t++) {
      float sum[OUTPUTS] = {};
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const float4 m = mixed.at(t * BLOCK_HEADS + inner, chunk * 32 + lane);
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) {
          const float4 v = values_of(held[pass & 1][o][chunk]);
          sum[o] += m.x * v.x + m.y * v.y + m.z * v.z + m.w * v.w;
        }
      }
      const float total = sum_over_lanes<OUTPUTS>(sum, lane);
      if (lane % (32 / OUTPUTS) == 0)
        outputs[t][warp * WARP_OUTPUTS + pass * OUTPUTS + lane / (32 / OUTPUTS)] = total;
    }
    if (pass + 2 < PASSES) fetch(pass + 2);
  }
  __syncthreads();
  const int t = warp;  // ROWS <= WARPS
  if (t >= ROWS || first + t >= T) return;
  float4 v = reinterpret_cast<const float4*>(outputs[t])[lane];
  const size_t at = (size_t)(first + t) * (HEADS * VALUE) + start;
  if (!suh) {
    write_four<X_TYPE>(reinterpret_cast<Number*>(out) + at, 4 * lane, GROUP, v);
    return;
  }
  typedef Activation<X_TYPE> A;
  v = make_float4(A::read(A::write(v.x)), A::read(A::write(v.y)), A::read(A::write(v.z)), A::read(A::write(v.w)));
  store_swizzled(reinterpret_cast<__half*>(out) + at, hadamard(times(v, scale), lane), lane);
}

#define KERNELS(ROWS)                                                                                        \
  extern "C" __global__ __launch_bounds__(THREADS, 2) void absorb_##ROWS(                                    \
      const Number* q, const Weights* kv_b, Number* absorbed, int T, float scale) {                          \
    absorb<ROWS>(q, kv_b, absorbed, T, scale);                                                               \
  }                                                                                                          \
  extern "C" __global__ __launch_bounds__(THREADS, 2) void finish_##ROWS(                                    \
      const float* partial, const float2* sums, const Weights* kv_b, const int* num, const __half* suh,      \
      void* out, int T, int K, int runs, int run_rows) {                                                     \
    finish<ROWS>(partial, sums, kv_b, num, suh, out, T, K, runs, run_rows);                                  \
  }
KERNELS(1)
KERNELS(2)
KERNELS(4)
KERNELS(8)
