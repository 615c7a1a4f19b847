// A sparse layer between its first products and its choice of tokens: query latents normed and
// rotated, latents normed into the cache, indexer keys into the ring, complete pools pooled. Macros:
// X_TYPE of activations, P_TYPE of pooled keys, FP8 (1: latents are e4m3 with a scale for each 128).
#include <cuda_fp8.h>

#include "activations.cuh"
#include "gemv.cuh"

typedef Activation<X_TYPE> Act;
typedef Act::type Number;
constexpr int PAGE = 64, RING = 16, DI = GROUP;  // tokens of a page, of the ring; channels of a key
constexpr int QUERY_EACH = 2;                    // groups of a query latent that a warp has at most
constexpr float MAX_FP8 = 448.f;

// Norm weights may be of any type: two bits of `types` say which.
struct Norms {
  const void *query, *latent, *key, *bias, *ape;
  int types;
};
__device__ __forceinline__ float4 weights_of(const void* at, int type, int start) {
  if (type == FLOAT32) return read_four<FLOAT32>(at, start, start + 4);
  if (type == FLOAT16) return read_four<FLOAT16>(at, start, start + 4);
  return read_four<BFLOAT16>(at, start, start + 4);
}

__device__ __forceinline__ float4 load_four(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ __forceinline__ float4 load_four(const __nv_bfloat16* at) {
  const uint2 w = *reinterpret_cast<const uint2*>(at);
  return make_float4(__uint_as_float(w.x << 16), __uint_as_float(w.x & 0xffff0000u),
                     __uint_as_float(w.y << 16), __uint_as_float(w.y & 0xffff0000u));
}
__device__ __forceinline__ float4 rounded(float4 v) {
  return make_float4(Act::read(Act::write(v.x)), Act::read(Act::write(v.y)), Act::read(Act::write(v.z)),
                     Act::read(Act::write(v.w)));
}
__device__ __forceinline__ float4 scaled(float4 v, float by) {
  return make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
}
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int bit = 16; bit; bit /= 2) v += __shfl_xor_sync(ALL, v, bit);
  return v;
}
__device__ __forceinline__ float squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

// The sum over a block; all its threads together.
__device__ __forceinline__ float block_sum(float v) {
  __shared__ float of_warp[WARPS];
  v = warp_sum(v);
  if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = v;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += of_warp[warp];
  return sum;
}

// A token's place; the table is not read for those that are not real.
struct Token {
  int slot, position, behind;  // behind: real tokens of its sequence from it on, 0 for none
  int row;                     // of the latents
};
__device__ __forceinline__ Token token_of(int r, int M, int P, const int* slots, const int* positions,
                                          const int* counts, const int* table) {
  const int b = r / M, m = r % M;
  Token token{slots[b], positions[b] + m, max(0, counts[b] - m), 0};
  if (token.behind) token.row = table[(size_t)b * P + token.position / PAGE] * PAGE + token.position % PAGE;
  return token;
}

// Query latents [T, Rq] of row r, and rotated [count, T, Rq].
__device__ __forceinline__ void open_query(const Number* projected, const Norms& norms, Number* q_latent,
                                           const __half* suh_0, const __half* suh_1, __half* rotated, int r,
                                           int T, int Rq, int width, float eps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float4 weight[QUERY_EACH], scale[QUERY_EACH][2], x[QUERY_EACH];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < QUERY_EACH; i++) {
    const int start = (warp + i * WARPS) * GROUP;
    if (start >= Rq) continue;
    weight[i] = weights_of(norms.query, norms.types & 3, start + 4 * lane);
    if (suh_0) scale[i][0] = scales(suh_0 + start, lane);
    if (suh_1) scale[i][1] = scales(suh_1 + start, lane);
  }
  take_turn();
#pragma unroll
  for (int i = 0; i < QUERY_EACH; i++) {
    const int start = (warp + i * WARPS) * GROUP;
    if (start >= Rq) continue;
    x[i] = load_four(projected + (size_t)r * width + start + 4 * lane);
    sum += squares(x[i]);
  }
  const float by = rsqrtf(block_sum(sum) / Rq + eps);
#pragma unroll
  for (int i = 0; i < QUERY_EACH; i++) {
    const int start = (warp + i * WARPS) * GROUP;
    if (start >= Rq) continue;
    const float4 v = rounded(times(scaled(x[i], by), weight[i]));
    const size_t at = (size_t)r * Rq + start;
    write_four<X_TYPE>(q_latent + at, 4 * lane, GROUP, v);
    if (suh_0) store_swizzled(rotated + at, hadamard(times(v, scale[i][0]), lane), lane);
    if (suh_1) store_swizzled(rotated + (size_t)T * Rq + at, hadamard(times(v, scale[i][1]), lane), lane);
  }
}

// 128 channels of a latent as e4m3, with their scale; by one warp.
__device__ __forceinline__ void store_fp8(u32* codes, float* scale, float4 v, int lane) {
  const bool is_bad = __any_sync(ALL, !(squares(v) == squares(v)));  // fmaxf would drop it
  float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
  for (int bit = 16; bit; bit /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, bit));
  const float own = is_bad ? __uint_as_float(0x7fffffffu) : most == 0 ? 1.f : most / MAX_FP8;
  auto code = [&](float f) { return (u32)__nv_cvt_float_to_fp8(f / own, __NV_SATFINITE, __NV_E4M3); };
  codes[lane] = code(v.x) | code(v.y) << 8 | code(v.z) << 16 | code(v.w) << 24;
  if (lane == 0) *scale = own;
}

__device__ __forceinline__ void open_latent(const Number* x, const Norms& norms, void* latents,
                                            float* scales, Token token, int Cl, float eps) {
  const int lane = threadIdx.x & 31, start = (threadIdx.x >> 5) * GROUP;
  float4 v = make_float4(0, 0, 0, 0);
  if (start < Cl) v = load_four(x + start + 4 * lane);
  const float by = rsqrtf(block_sum(squares(v)) / Cl + eps);
  if (start >= Cl || !token.behind) return;
  v = rounded(times(scaled(v, by), weights_of(norms.latent, norms.types >> 2 & 3, start + 4 * lane)));
  const size_t at = (size_t)token.row * Cl + start;
  if constexpr (FP8)
    store_fp8(reinterpret_cast<u32*>(reinterpret_cast<unsigned char*>(latents) + at), scales + at / GROUP, v,
              lane);
  else
    write_four<X_TYPE>(reinterpret_cast<Number*>(latents) + at, 4 * lane, GROUP, v);
}

__device__ __forceinline__ float4 normed_key(const float* x, const Norms& norms, float eps, int lane) {
  float4 v = read_four<FLOAT32>(x, 4 * lane, DI);
  const float mean = warp_sum(v.x + v.y + v.z + v.w) / DI;
  v = make_float4(v.x - mean, v.y - mean, v.z - mean, v.w - mean);
  v = scaled(v, rsqrtf(warp_sum(squares(v)) / DI + eps));
  v = times(v, weights_of(norms.key, norms.types >> 4 & 3, 4 * lane));
  const float4 bias = weights_of(norms.bias, norms.types >> 6 & 3, 4 * lane);
  return make_float4(v.x + bias.x, v.y + bias.y, v.z + bias.z, v.w + bias.w);
}

// Keys and gates of a token to the ring; of a pool that it completes, their mean. The warp `i` has the
// pool's i-th token: from these rows, or from the ring if it came before them.
__device__ __forceinline__ void open_key(const float* small, int stride, const Norms& norms, void* pooled,
                                         float* ring_keys, float* ring_gates, Token token, int m, int pool,
                                         float eps, bool to_ring, bool to_pool) {
  __shared__ float keys[WARPS][DI], gates[WARPS][DI];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, back = pool - 1 - warp;
  const bool is_full = to_pool && token.behind && token.position % pool == pool - 1;
  auto ring_at = [&](int position) { return ((size_t)token.slot * RING + position % RING) * DI + 4 * lane; };
  if (token.behind && (back == 0 || (is_full && back > 0))) {
    float4 key, gate;
    if (back <= m) {
      const float* x = small - (size_t)back * stride;
      key = normed_key(x, norms, eps, lane), gate = read_four<FLOAT32>(x + DI, 4 * lane, DI);
    } else {
      key = load_four(ring_keys + ring_at(token.position - back));
      gate = load_four(ring_gates + ring_at(token.position - back));
    }
    if (back == 0 && to_ring && token.behind <= RING) {
      *reinterpret_cast<float4*>(ring_keys + ring_at(token.position)) = key;
      *reinterpret_cast<float4*>(ring_gates + ring_at(token.position)) = gate;
    }
    *reinterpret_cast<float4*>(keys[warp] + 4 * lane) = key;
    *reinterpret_cast<float4*>(gates[warp] + 4 * lane) = gate;
  }
  __syncthreads();
  if (!is_full || threadIdx.x >= DI) return;
  const int c = threadIdx.x;
  float most = -3.4e38f, total = 0, sum = 0;
  for (int i = 0; i < pool; i++) {
    const float4 four = weights_of(norms.ape, norms.types >> 8 & 3, i * DI + c / 4 * 4);
    const float place = c % 4 == 0 ? four.x : c % 4 == 1 ? four.y : c % 4 == 2 ? four.z : four.w;
    gates[i][c] += place;
    most = fmaxf(most, gates[i][c]);
  }
  for (int i = 0; i < pool; i++) {
    const float share = expf(gates[i][c] - most);
    total += share, sum += share * keys[i][c];
  }
  typedef Activation<P_TYPE> P;
  reinterpret_cast<P::type*>(pooled)[(size_t)(token.row / pool) * DI + c] = P::write(sum / total);
}

enum Phase { BUT_RING = 0, RING_ONLY = 1, ALL_AT_ONCE = 2 };

// Three blocks a row: its query latent, its latent, its key. Where M tokens would write over keys that
// others of them still read, the ring's turn comes in a launch of its own.
extern "C" __global__ __launch_bounds__(THREADS, 2) void open_rows(
    const Number* __restrict__ projected, const float* __restrict__ small, const void* q_norm,
    const void* kv_norm, const void* key_norm, const void* key_bias, const void* ape, int types, void* latents,
    float* scales, void* pooled, float* ring_keys, float* ring_gates, const int* __restrict__ slots,
    const int* __restrict__ positions, const int* __restrict__ counts, const int* __restrict__ table,
    const __half* suh_0, const __half* suh_1, Number* q_latent, __half* rotated, float* weights, int T, int M,
    int P, int Rq, int Cl, int Hi, int pool, float eps, float key_eps, int phase) {
  const Norms norms{q_norm, kv_norm, key_norm, key_bias, ape, types};
  const int part = blockIdx.x % 3, r = blockIdx.x / 3, width = Rq + Cl, stride = 2 * DI + Hi;
  if (part == 0 && phase != RING_ONLY) {
    open_query(projected, norms, q_latent, suh_0, suh_1, rotated, r, T, Rq, width, eps);
    return;
  }
  take_turn();
  if (part == 0 || (part == 1 && phase == RING_ONLY)) return;
  const Token token = token_of(r, M, P, slots, positions, counts, table);
  if (part == 1) {
    open_latent(projected + (size_t)r * width + Rq, norms, latents, scales, token, Cl, eps);
    return;
  }
  const float* own = small + (size_t)r * stride;
  if (phase != RING_ONLY)
    for (int i = threadIdx.x; i < Hi; i += THREADS) weights[(size_t)r * Hi + i] = own[2 * DI + i] * rsqrtf(Hi);
  open_key(own, stride, norms, pooled, ring_keys, ring_gates, token, r % M, pool, key_eps, phase != BUT_RING,
           phase != RING_ONLY);
}
