// A KDA layer between its products: convolution, gates, delta rule, gated norm, rotation. One block for
// each sequence and head; it owns the head's state, which it holds in registers, and its channels of
// the history. Of 16 warps each has 8 rows of the state, each of its lanes 4 columns of them. TOKENS: the
// most of a sequence, 1 or 8.
#include "activations.cuh"
#include "gemv.cuh"

typedef Activation<X_TYPE> A;
typedef A::type X;

constexpr int BLOCK = 512, PARTS = BLOCK / 32, D = 128, OWN = D / PARTS;
constexpr int CHUNK = 128;        // inputs of f_b and g_b that lanes hold at a time
constexpr int HELPERS = BLOCK / TOKENS, DEPTH = TOKENS == 1 ? 1 : 4;  // threads, loads for a token's inputs
constexpr int PITCH = 2 * D + 8;  // of partial sums: what lanes add up lies in different banks
constexpr int PAD = 32;           // of staged inputs, likewise
constexpr float L2_EPS = 1e-6f, SCALE = 0.08838834764831845f;  // 128^-1/2

__device__ __forceinline__ float rounded(float v) { return A::read(A::write(v)); }
__device__ __forceinline__ float sigmoid(float v) { return __fdividef(1.f, 1.f + expf(-v)); }
__device__ __forceinline__ float4 rounded(float4 v) {
  return make_float4(rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w));
}
__device__ __forceinline__ float4 scaled(float4 v, float by) {
  return make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
}
__device__ __forceinline__ float dot(float4 a, float4 b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
__device__ __forceinline__ void add_times(float4& sum, float by, float4 v) {
  sum.x += by * v.x, sum.y += by * v.y, sum.z += by * v.z, sum.w += by * v.w;
}
__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int bit = 16; bit; bit /= 2) v += __shfl_xor_sync(ALL, v, bit);
  return v;
}
__device__ __forceinline__ void read_own(float (&to)[OWN], const float* from) {
  const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// Rows of f_b and g_b that a warp multiplies: lane / 4 of its eight. f and g: tokens 2 (lane % 4) and the
// next. staged [tokens][f_a, g_a, PAD].
struct Products {
  const X *f_b, *g_b;  // this lane's rows
  int R, lane;
  float f[2], g[2];
#if X_TYPE == 2  // bfloat16
  uint4 wf[4], wg[4];

  __device__ __forceinline__ void fetch(int base) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = base + 32 * i + 8 * (lane & 3);
      wf[i] = wg[i] = make_uint4(0, 0, 0, 0);
      if (at < R) {
        wf[i] = __ldg(reinterpret_cast<const uint4*>(f_b + at));
        wg[i] = __ldg(reinterpret_cast<const uint4*>(g_b + at));
      }
    }
  }
  static __device__ __forceinline__ void mma(float (&c)[4], u32 f0, u32 g0, u32 f1, u32 g1, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(f0), "r"(g0), "r"(f1), "r"(g1), "r"(b0), "r"(b1));
  }
  // Of a tile, rows 0..7 are f_b's and count for f_a, rows 8..15 are g_b's and count for g_a.
  __device__ __forceinline__ void multiply(const X* staged, int tokens) {
    const X* own = staged + (lane >> 2) * (2 * R + PAD);
    float cf[2][4] = {}, cg[2][4] = {};
#pragma unroll 1
    for (int base = 0; base < R; base += CHUNK) {
      if (base) fetch(base);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = base + 32 * i + 8 * (lane & 3);
        uint4 xf = make_uint4(0, 0, 0, 0), xg = xf;
        if (at < R && (lane >> 2) < tokens) {
          xf = *reinterpret_cast<const uint4*>(own + at);
          xg = *reinterpret_cast<const uint4*>(own + R + at);
        }
        mma(cf[0], wf[i].x, wg[i].x, wf[i].y, wg[i].y, xf.x, xf.y);
        mma(cg[0], wf[i].x, wg[i].x, wf[i].y, wg[i].y, xg.x, xg.y);
        mma(cf[1], wf[i].z, wg[i].z, wf[i].w, wg[i].w, xf.z, xf.w);
        mma(cg[1], wf[i].z, wg[i].z, wf[i].w, wg[i].w, xg.z, xg.w);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) f[e] = cf[0][e] + cf[1][e], g[e] = cg[0][2 + e] + cg[1][2 + e];
  }
#else
  __device__ __forceinline__ void fetch(int) {}
  __device__ __forceinline__ void multiply(const X* staged, int tokens) {
    f[0] = f[1] = g[0] = g[1] = 0;
    for (int m = 0; m < tokens; m++) {
      const X* x = staged + m * (2 * R + PAD);
      float a = 0, b = 0;
      for (int j = lane & 3; j < R; j += 4) {
        a += A::read(f_b[j]) * A::read(x[j]);
        b += A::read(g_b[j]) * A::read(x[R + j]);
      }
      a += __shfl_xor_sync(ALL, a, 1), b += __shfl_xor_sync(ALL, b, 1);
      a += __shfl_xor_sync(ALL, a, 2), b += __shfl_xor_sync(ALL, b, 2);
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (m == 2 * (lane & 3) + e) f[e] = a, g[e] = b;
    }
  }
#endif
};

// 128 channels of a row of the result: as they are, or rotated for the product that follows.
__device__ __forceinline__ void store_row(void* y, size_t start, const __half* suh, float4 scale, float4 v,
                                          int lane) {
  if (suh)
    store_swizzled(reinterpret_cast<__half*>(y) + start, hadamard(times(v, scale), lane), lane);
  else
    write_four<X_TYPE>(reinterpret_cast<X*>(y) + start, 4 * lane, D, v);
}

// Shapes as in the op's contract; M tokens a sequence. States, history, slots and counts are read before
// this kernel's turn: what the kernel just before it wrote there would be missed.
extern "C" __global__ __launch_bounds__(BLOCK) void kda_decode(
    const X* qkv, const float* small, const X* __restrict__ f_b, const X* __restrict__ g_b,
    const float* __restrict__ conv, const float* __restrict__ A_log, const float* __restrict__ dt_bias,
    const float* __restrict__ o_norm, const __half* __restrict__ suh, X* history, float* states,
    X* pending_conv, float* pending_k, float* pending_gate, float* pending_deltas, const int* slots,
    const int* counts, void* y, int tokens, int H, int R, float lower_bound, float eps) {
  extern __shared__ __align__(16) float shared[];
  const int M = TOKENS == 1 ? 1 : tokens;
  float* const raw = shared;                // [M][3][D]: q, k, v after the convolution
  float* const decay = raw + M * 3 * D;     // [M][D]
  float* const gates = decay + M * D;       // [M][D], of the result
  float* const outs = gates + M * D;        // [M][D]
  float* const scalars = outs + M * D;      // [M][4]: q q, k k, q k, beta
  float* const change = scalars + 4 * M;    // [D]
  float* const partial = change + D;        // [PARTS][PITCH]
  X* const staged = reinterpret_cast<X*>(partial + PARTS * PITCH);

  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int b = blockIdx.x / H, h = blockIdx.x % H, first = b * M, C = 3 * H * D;
  const int slot = slots[b], given = counts[b];
  auto place = [&](int m) { return ((size_t)(first + m) * H + h) * D; };  // in [T, H, D]

  // What can be read before it is this kernel's turn.
  const int row = warp * OWN + (lane >> 2);  // of f_b and g_b
  Products product{f_b + (size_t)(h * D + row) * R, g_b + (size_t)(h * D + row) * R, R, lane};
  product.fetch(0);
  const int channel = (tid / D * H + h) * D + tid % D;
  float4 taps = make_float4(0, 0, 0, 0);
  if (tid < 3 * D) taps = __ldg(reinterpret_cast<const float4*>(conv) + channel);
  const float steep = A_log[h], bias = dt_bias[h * D + row];
  if (given <= 0) {
    take_turn();
    const float4 zero = make_float4(0, 0, 0, 0);
    if (warp < M) store_row(y, place(warp), suh, zero, zero, lane);
    return;
  }
  const int count = TOKENS == 1 ? 1 : min(given, M);
  float* const state = states + ((size_t)slot * H + h) * (D * D) + warp * OWN * D + 4 * lane;
  float4 s[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) s[i] = __ldcs(reinterpret_cast<const float4*>(state + i * D));
  X* const past = history + (size_t)slot * 3 * C + channel;
  X held[3] = {}, x[TOKENS] = {};  // not converted before they are used: that would wait for them
  if (tid < 3 * D) held[0] = past[0], held[1] = past[C], held[2] = past[2 * C];
  take_turn();

#pragma unroll
  for (int m = 0; m < TOKENS; m++)
    if (tid < 3 * D && m < count) x[m] = qkv[(size_t)(first + m) * C + channel];
  if (const int m = tid / HELPERS, helper = tid % HELPERS; m < count) {
    const float* from = small + (size_t)(first + m) * (2 * R + H);
    X* to = staged + m * (2 * R + PAD);
    const float b_product = from[2 * R + h];
#pragma unroll 1
    for (int start = helper; start < 2 * R; start += DEPTH * HELPERS) {
      float v[DEPTH];
#pragma unroll
      for (int j = 0; j < DEPTH; j++) v[j] = start + j * HELPERS < 2 * R ? from[start + j * HELPERS] : 0.f;
#pragma unroll
      for (int j = 0; j < DEPTH; j++)
        if (start + j * HELPERS < 2 * R) to[start + j * HELPERS] = A::write(v[j]);
    }
    if (helper == HELPERS - 1) scalars[4 * m + 3] = sigmoid(rounded(b_product));
  }
  if (tid < 3 * D)
#pragma unroll
    for (int m = 0; m < TOKENS; m++)
      if (m < count) {
        const float sum = A::read(held[0]) * taps.x + A::read(held[1]) * taps.y + A::read(held[2]) * taps.z +
                          A::read(x[m]) * taps.w;
        raw[m * 3 * D + tid] = rounded(sum * sigmoid(sum));
        held[0] = held[1], held[1] = held[2], held[2] = x[m];
        if (m == 0)
          past[0] = held[0], past[C] = held[1], past[2 * C] = held[2];
        else
          pending_conv[(size_t)(first + m) * C + channel] = x[m];
      }
  __syncthreads();

  product.multiply(staged, count);
  const float steepness = expf(steep);
#pragma unroll
  for (int e = 0; e < 2; e++)
    if (const int m = 2 * (lane & 3) + e; m < count) {
      const float gate = lower_bound * sigmoid(steepness * (rounded(product.f[e]) + bias));
      decay[m * D + row] = expf(gate);
      gates[m * D + row] = sigmoid(rounded(product.g[e]));
      if (m) pending_gate[place(m) + row] = gate;
    }
#pragma unroll 1
  for (int task = warp; task < 3 * count; task += PARTS) {
    const int m = task / 3, kind = task % 3;
    const float4* q = reinterpret_cast<const float4*>(raw + m * 3 * D) + lane;
    const float4 left = q[kind == 1 ? D / 4 : 0], right = q[kind == 0 ? 0 : D / 4];
    const float sum = sum_of_warp(dot(left, right));
    if (lane == 0) scalars[4 * m + kind] = sum;
  }
  const float4 norm = __ldg(reinterpret_cast<const float4*>(o_norm) + lane);
  const float4 scale = suh ? scales(suh + h * D, lane) : make_float4(1, 1, 1, 1);
  __syncwarp();  // a warp reads only the decays that it wrote

  // q and k are of any length here: their norms are brought in with the sums.
  for (int m = 0; m < count; m++) {
    const float *q = raw + m * 3 * D, *k = q + D, *v = k + D;
    float own_q[OWN], own_k[OWN], own_decay[OWN];
    read_own(own_q, q + warp * OWN), read_own(own_k, k + warp * OWN);
    read_own(own_decay, decay + m * D + warp * OWN);
    float4 seen = make_float4(0, 0, 0, 0), asked = seen;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      s[i] = scaled(s[i], own_decay[i]);
      add_times(seen, own_k[i], s[i]), add_times(asked, own_q[i], s[i]);
    }
    reinterpret_cast<float4*>(partial + warp * PITCH)[lane] = seen;
    reinterpret_cast<float4*>(partial + warp * PITCH + D)[lane] = asked;
    __syncthreads();
    const int column = warp * OWN + (lane & 7);
    float by_k = 0, by_q = 0;
#pragma unroll
    for (int j = 0; j < PARTS; j += 4) {
      const float* from = partial + (j + (lane >> 3)) * PITCH + column;
      by_k += from[0], by_q += from[D];
    }
#pragma unroll
    for (int bit = 8; bit < 32; bit *= 2)
      by_k += __shfl_xor_sync(ALL, by_k, bit), by_q += __shfl_xor_sync(ALL, by_q, bit);
    const float4 sums = reinterpret_cast<const float4*>(scalars)[m];
    const float by = rsqrtf(sums.y + L2_EPS), q_by = rsqrtf(sums.x + L2_EPS) * SCALE;
    const float delta = sums.w * (v[column] - by * by_k);
    if (lane < OWN) {
      change[column] = by * delta;
      outs[m * D + column] = rounded(q_by * (by_q + by * delta * sums.z));
      if (m) pending_deltas[place(m) + column] = delta, pending_k[place(m) + column] = by * k[column];
    }
    __syncthreads();
    const float4 added = reinterpret_cast<const float4*>(change)[lane];
#pragma unroll
    for (int i = 0; i < OWN; i++) add_times(s[i], own_k[i], added);
    if (m == 0)
#pragma unroll
      for (int i = 0; i < OWN; i++) __stcs(reinterpret_cast<float4*>(state + i * D), s[i]);
  }

  if (warp >= M) return;
  float4 result = make_float4(0, 0, 0, 0);
  if (warp < count) {
    const float4 o = reinterpret_cast<const float4*>(outs + warp * D)[lane];
    const float by = rsqrtf(sum_of_warp(dot(o, o)) / D + eps);
    const float4 gate = reinterpret_cast<const float4*>(gates + warp * D)[lane];
    result = rounded(times(rounded(times(scaled(o, by), norm)), gate));
  }
  store_row(y, place(warp), suh, scale, result, lane);
}
