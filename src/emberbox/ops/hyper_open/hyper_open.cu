// Two launches between sublayers. spread_streams updates the streams and adds up, for its columns, all
// that the coefficients depend on: products with fn, and products of streams with each other, from
// which the norms of all streams and of the collapsed one follow. collapse_streams does the rest.
#include "gemv.cuh"
#include "streams.cuh"

constexpr int COLUMNS = 32;     // of every stream in a block of spread_streams
constexpr int TOKENS = WARPS;   // of such a block: one a warp
constexpr int PARTS = COLUMNS / 4;
constexpr int PRODUCTS = STREAMS * (STREAMS + 2), PAIRS = 10, SUMS = PRODUCTS + PAIRS;

// Pairs of streams: each with itself, then 01 02 03 12 13 23.
__device__ __forceinline__ int left_of(int pair) { return (int)(0x2110003210ll >> 4 * pair) & 3; }
__device__ __forceinline__ int right_of(int pair) { return (int)(0x3323213210ll >> 4 * pair) & 3; }

// N numbers of each of eight neighbouring lanes, added across them: lane i has the sum of the i-th,
// modulo N. The order of additions is the same for every N.
template <int N>
__device__ __forceinline__ float add_across(float (&v)[N], int lane) {
  int count = N;
#pragma unroll
  for (int bit = PARTS / 2; bit; bit /= 2)
    if (count > bit) {
      count /= 2;
#pragma unroll
      for (int i = 0; i < count; i++) {
        const float mine = lane & bit ? v[i + count] : v[i], theirs = lane & bit ? v[i] : v[i + count];
        v[i] = mine + __shfl_xor_sync(ALL, theirs, bit);
      }
    } else {
#pragma unroll
      for (int i = 0; i < count; i++) v[i] += __shfl_xor_sync(ALL, v[i], bit);
    }
  return v[0];
}

// Where a lane finds its four columns of a token: in y, in stream 0, and in the stream it makes.
struct Places {
  unsigned result, first, own, post, mix;

  __device__ __forceinline__ Places(int token, int stream, int column, int H) {
    result = ahead(token * H + column), first = ahead(token * STREAMS * H + column);
    own = ahead(first + stream * H), post = ahead(token * STREAMS + stream);
    mix = ahead(token * STREAMS * STREAMS + stream);
  }
};

// A lane's four columns of its stream, updated where there is a result y0 (+ y1). The warp reads all
// streams of these columns before it writes.
__device__ __forceinline__ float4 update_streams(void* streams, const void* y0, const void* y1,
                                                 const float* post, const float* mix, const Places& at,
                                                 int H) {
  if (!y0) return load_four<X_TYPE>(streams, at.own);
  typename Four<X_TYPE>::type x[STREAMS];
#pragma unroll
  for (int s = 0; s < STREAMS; s++) x[s] = load_packed<X_TYPE>(streams, at.first + s * H);
  const Spreading spreading(post + at.post, mix + at.mix);
  const float4 y = load_result<X_TYPE>(y0, y1, at.result);
  const float4 updated = spreading.apply<X_TYPE>(x, y);
  __syncwarp();
  store_four<X_TYPE>(streams, at.own, updated);
  return updated;
}

typedef float4 Held[STREAMS][PARTS];  // of a token, the columns of a block

// One sum of up to N tokens, by eight lanes. Tokens that are not there go nowhere.
template <int N, typename OfToken>
__device__ __forceinline__ void add_sum(const Held* held, OfToken of_token, float* partial, int sum,
                                        int tokens, int blocks, int lane) {
  const int part = lane % PARTS;
  float v[N];
#pragma unroll
  for (int t = 0; t < N; t++) v[t] = of_token(held[t]);
  const float total = add_across(v, lane);
  if (part < min(N, tokens) && sum < SUMS) partial[(part * SUMS + sum) * blocks] = total;
}

// All sums: the lanes of a product have its weights, those of a pair may have another one.
template <int N>
__device__ __forceinline__ void add_columns(const Held* held, const float4 (&weight)[STREAMS],
                                            float* partial, int index, int tokens, int blocks, int lane) {
  const int part = lane % PARTS;
  if (index < PRODUCTS) {
    auto product = [&](const Held& x) {
      return (dot(weight[0], x[0][part]) + dot(weight[1], x[1][part])) +
             (dot(weight[2], x[2][part]) + dot(weight[3], x[3][part]));
    };
    add_sum<N>(held, product, partial, index, tokens, blocks, lane);
    return;
  }
#pragma unroll
  for (int sum = index; sum < index + 16; sum += 8) {
    const int left = left_of(sum - PRODUCTS), right = right_of(sum - PRODUCTS);
    auto product = [&](const Held& x) { return dot(x[left][part], x[right][part]); };
    add_sum<N>(held, product, partial, sum, tokens, blocks, lane);
  }
}

// Blocks: H / 32 for every eight tokens. partial [T, SUMS, H / 32]. Eight lanes make one sum.
extern "C" __global__ __launch_bounds__(THREADS, 3) void spread_streams(
    void* streams, const void* y0, const void* y1, const float* post, const float* mix,
    const void* fn, float* partial, int T, int H) {
  __shared__ Held held[TOKENS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = lane % PARTS;
  const int blocks = H / COLUMNS, block = blockIdx.x % blocks, first = blockIdx.x / blocks * TOKENS;
  const int column = block * COLUMNS + 4 * part, index = threadIdx.x / PARTS;
  const Places places(first + warp, lane / PARTS, column, H);
  typename Four<FN_TYPE>::type packed[STREAMS] = {};
  if (index < PRODUCTS)
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
      packed[s] = load_packed<FN_TYPE>(fn, (index * STREAMS + s) * H + column);
  take_turn();
  if (first + warp < T)
    held[warp][lane / PARTS][part] = update_streams(streams, y0, y1, post, mix, places, H);
  __syncthreads();
  float4 weight[STREAMS];
#pragma unroll
  for (int s = 0; s < STREAMS; s++) weight[s] = Four<FN_TYPE>::unpack(packed[s]);
  const int tokens = min(TOKENS, T - first);
  partial += first * SUMS * blocks + block;
  if (tokens == 1) {
    add_columns<1>(held, weight, partial, index, 1, blocks, lane);
  } else {
#pragma unroll 1
    for (int t = 0; t < tokens; t += 4)
      add_columns<4>(held + t, weight, partial + t * SUMS * blocks, index, tokens - t, blocks, lane);
  }
}

// sum[n] = the sum of a token's partial sums from row[n] on, over all blocks, in every lane.
template <int N>
__device__ __forceinline__ void add_up(float (&sum)[N], const float* partial, const unsigned (&row)[N],
                                       int blocks, int lane) {
#pragma unroll
  for (int n = 0; n < N; n++) sum[n] = 0;
#pragma unroll 1
  for (int at = 4 * lane; at < blocks; at += 128) {
    float4 v[N];
#pragma unroll
    for (int n = 0; n < N; n++) v[n] = __ldcg(reinterpret_cast<const float4*>(partial + (row[n] + at)));
#pragma unroll
    for (int n = 0; n < N; n++) sum[n] += (v[n].x + v[n].y) + (v[n].z + v[n].w);
  }
#pragma unroll
  for (int bit = 16; bit; bit /= 2)
#pragma unroll
    for (int n = 0; n < N; n++) sum[n] += __shfl_xor_sync(ALL, sum[n], bit);
}

__device__ __forceinline__ float sigmoid(float z) { return __fdividef(1.f, 1.f + __expf(-z)); }

__device__ __forceinline__ float pick(const float (&v)[4], int i) {
  return i & 2 ? (i & 1 ? v[3] : v[2]) : (i & 1 ? v[1] : v[0]);
}

// 1 / x, to one unit in the last place.
__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Lane 4 i + j has a logit and gets its entry of the nearly doubly stochastic matrix; lanes above 15
// do as those below. The entries stay K[i][j] row[i] column[j] throughout: dividing a row by its sum
// + eps makes row[i] = 1 / (sum_j K[i][j] column[j] + eps / row[i]).
struct Sinkhorn {
  float k[4][4], row[4], column[4], of_row[4], of_column[4], eps;

  // One of the two half steps; the largest relative change that it made.
  template <bool ROWS_TURN, bool IS_NEAR>
  __device__ __forceinline__ float divide() {
    float(&mine)[4] = ROWS_TURN ? row : column;
    float(&sums)[4] = ROWS_TURN ? of_row : of_column;
    const float(&other)[4] = ROWS_TURN ? column : row;
    float change = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float sum = eps * sums[i];
#pragma unroll
      for (int j = 0; j < 4; j++) sum += (ROWS_TURN ? k[i][j] : k[j][i]) * other[j];
      const float off = 1.f - sum * mine[i];
      // Near the end one step of Newton's is exact: twice as fast as an inverse.
      mine[i] = IS_NEAR ? mine[i] + mine[i] * off : inverse(sum);
      sums[i] = sum;
      change = fmaxf(change, fabsf(off));
    }
    return change;
  }

  __device__ __forceinline__ float solve(float logit, int iterations, int lane) {
    float top = fmaxf(logit, __shfl_xor_sync(ALL, logit, 1));
    top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
    const float e = __expf(logit - top);
    float total = e + __shfl_xor_sync(ALL, e, 1);
    total += __shfl_xor_sync(ALL, total, 2);
    const float own = __fdividef(e, total) + eps;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      row[i] = column[i] = of_row[i] = of_column[i] = 1;
#pragma unroll
      for (int j = 0; j < 4; j++) k[i][j] = __shfl_sync(ALL, own, 4 * i + j);
    }
    divide<false, false>();
    int step = 1;
    for (float change = 1; step < iterations && change > NEAR; step++) {
      change = divide<true, false>();
      divide<false, false>();
    }
#pragma unroll 2
    for (; step < iterations; step++) {
      divide<true, true>();
      divide<false, true>();
    }
    return own * pick(row, lane >> 2 & 3) * pick(column, lane & 3);
  }

  static constexpr float NEAR = 1.f / 1024;
};

// post and mix of a token, by a block. Sums are those of partial from `pre` on.
__device__ __forceinline__ void spread_coefficients(const float* partial, const float* base,
                                                    const float* scale, float* post, float* mix, int token,
                                                    int H, int iterations, float norm_eps, float hc_eps) {
  constexpr int each = 3, first = STREAMS;  // 24 sums: without pre, with the streams' squares
  __shared__ float totals[WARPS * each];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, entry = lane & 15;
  const float of_post = base[STREAMS + (lane & 3)], of_mix = base[2 * STREAMS + entry];
  const float scale_of_post = scale[1], scale_of_mix = scale[2], share = inverse(H);
  const int blocks = H / COLUMNS;
  unsigned row[each];
#pragma unroll
  for (int n = 0; n < each; n++) row[n] = ahead((token * SUMS + first + warp * each + n) * blocks);
  take_turn();
  float sum[each];
  add_up(sum, partial, row, blocks, lane);
#pragma unroll
  for (int n = 0; n < each; n++)
    if (lane == n) totals[warp * each + n] = sum[n];
  __syncthreads();
  const float* squares = totals + PRODUCTS - first;
  const float square = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  const float inverse_norm = rsqrtf(square * share / STREAMS + norm_eps);
  if (warp == 1 && lane < STREAMS)
    post[token * STREAMS + lane] = 2 * sigmoid(totals[lane] * inverse_norm * scale_of_post + of_post);
  if (warp) return;
  Sinkhorn sinkhorn;
  sinkhorn.eps = hc_eps;
  const float logit = totals[STREAMS + entry] * inverse_norm * scale_of_mix + of_mix;
  const float result = sinkhorn.solve(logit, iterations, lane);
  if (lane < STREAMS * STREAMS) mix[token * STREAMS * STREAMS + lane] = result;
}

// A lane's four channels of what the next sublayer reads, on their way.
struct Collapsing {
  int start, which;  // the first of the warp's 128 channels, the number of the scales
  unsigned first;    // place in stream 0
  typename Four<X_TYPE>::type x[STREAMS];
  typename Four<NORM_TYPE>::type norm;
  Four<FLOAT16>::type scale;

  __device__ __forceinline__ void load_weights(const void* norms, const __half* suh, int token, int H,
                                               int lane) {
    const int channel = start + 4 * lane;
    norm = load_packed<NORM_TYPE>(norms, channel);
    if (suh) scale = load_packed<FLOAT16>(suh, channel);
    first = ahead(token * STREAMS * H + channel);
  }
  __device__ __forceinline__ void load_streams(const void* streams, int H) {
#pragma unroll
    for (int s = 0; s < STREAMS; s++) x[s] = load_packed<X_TYPE>(streams, first + s * H);
  }
};

// Blocks: first one for post and mix of each token, then several for each token's channels, `span`
// groups of 128 each. rotated [num_suhs, T, H].
extern "C" __global__ __launch_bounds__(THREADS) void collapse_streams(
    const void* streams, const float* partial, const float* base, const float* scale, const void* norm,
    const __half* suh0, const __half* suh1, const __half* suh2, void* x, __half* rotated, float* post,
    float* mix, int T, int H, int num_suhs, int span, int iterations, float norm_eps, float hc_eps) {
  const int groups = H / GROUP, blocks = (groups + span - 1) / span;
  const int block = blockIdx.x - T, token = block < 0 ? blockIdx.x : block / blocks;
  if (block < 0) {
    spread_coefficients(partial, base, scale, post, mix, token, H, iterations, norm_eps, hc_eps);
    return;
  }
  constexpr int each = 2;  // of 14 sums: the products of pre, and all pairs
  __shared__ float totals[WARPS * each];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, begin = block % blocks * span;
  const int copies = max(num_suhs, 1), tasks = min(span, groups - begin) * copies;
  Collapsing next;
  auto load_weights = [&](int task) {
    next.start = (begin + task / copies) * GROUP, next.which = task % copies;
    next.load_weights(norm, next.which == 0 ? suh0 : next.which == 1 ? suh1 : suh2, token, H, lane);
  };
  float bias[STREAMS];
#pragma unroll
  for (int s = 0; s < STREAMS; s++) bias[s] = base[s];
  const float scale_of_pre = scale[0], share = inverse(H);
  if (warp < tasks) load_weights(warp);
  unsigned row[each];
#pragma unroll
  for (int n = 0; n < each; n++) {
    const int i = warp * each + n;
    const int entry = i < STREAMS ? i : min(i - STREAMS + PRODUCTS, SUMS - 1);
    row[n] = ahead((token * SUMS + entry) * (H / COLUMNS));
  }
  take_turn();
  if (warp < tasks) next.load_streams(streams, H);
  float sum[each];
  add_up(sum, partial, row, H / COLUMNS, lane);
#pragma unroll
  for (int n = 0; n < each; n++)
    if (lane == n) totals[warp * each + n] = sum[n];
  __syncthreads();
  const float* pairs = totals + STREAMS;
  const float square = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
  const float inverse_norm = rsqrtf(square * share / STREAMS + norm_eps);
  float pre[STREAMS];
#pragma unroll
  for (int s = 0; s < STREAMS; s++)
    pre[s] = sigmoid(totals[s] * inverse_norm * scale_of_pre + bias[s]) + hc_eps;
  float collapsed = 0;  // its square
#pragma unroll
  for (int pair = 0; pair < PAIRS; pair++) {
    const float factor = pre[left_of(pair)] * pre[right_of(pair)];
    collapsed += (pair < STREAMS ? factor : 2 * factor) * pairs[pair];
  }
  const float inverse_rms = rsqrtf(fmaxf(collapsed, 0.f) * share + norm_eps);
  for (int task = warp; task < tasks;) {
    float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int s = 0; s < STREAMS; s++) add_times(v, pre[s], Four<X_TYPE>::unpack(next.x[s]));
    v = rounded<X_TYPE>(v);
    v = make_float4(v.x * inverse_rms, v.y * inverse_rms, v.z * inverse_rms, v.w * inverse_rms);
    v = rounded<X_TYPE>(times(v, Four<NORM_TYPE>::unpack(next.norm)));
    const int start = next.start, which = next.which;
    const unsigned row = token * H + start;
    if (which == 0) store_four<X_TYPE>(x, row + 4 * lane, v);
    if (num_suhs) {
      v = times(v, Four<FLOAT16>::unpack(next.scale));
      store_swizzled(rotated + which * T * H + row, hadamard(v, lane), lane);
    }
    task += WARPS;
    if (task >= tasks) break;
    load_weights(task);
    next.load_streams(streams, H);
  }
}
