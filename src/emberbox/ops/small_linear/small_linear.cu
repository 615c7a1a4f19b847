// y = x W^T in float32: a block has two rows of W, which it fetches before it is its turn, and
// multiplies with TOKENS rows of x at a time. Sums run in a fixed order, whatever the other rows.
#include "activations.cuh"
#include "gemv.cuh"

constexpr int OWN = 2;    // rows of W of a block
constexpr int VALUES = 8;  // neighbouring ones of a thread
constexpr int STEPS = 2;  // of a piece
constexpr int STEP = THREADS * VALUES, PIECE = STEPS * STEP;

// Eight neighbouring values as they are stored.
template <int TYPE>
struct Eight {
  typedef Activation<TYPE> A;
  static constexpr int loads = sizeof(typename A::type) / 2;
  uint4 held[loads];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < loads; i++) held[i] = make_uint4(0, 0, 0, 0);
  }
  // at: a multiple of 16 bytes. Past the L1 cache: what another kernel wrote is read too.
  __device__ __forceinline__ void load(const typename A::type* at) {
#pragma unroll
    for (int i = 0; i < loads; i++) held[i] = __ldcg(reinterpret_cast<const uint4*>(at) + i);
  }
  __device__ __forceinline__ float operator[](int i) const {
    const u32 words[4] = {held[i * loads / 8].x, held[i * loads / 8].y, held[i * loads / 8].z,
                          held[i * loads / 8].w};
    if constexpr (TYPE == FLOAT32)
      return __uint_as_float(words[i % 4]);
    else if constexpr (TYPE == BFLOAT16)
      return __uint_as_float(i & 1 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    else
      return __half2float(__ushort_as_half((unsigned short)(words[i / 2] >> (i & 1) * 16)));
  }
};

typedef Activation<X_TYPE>::type X;
typedef Activation<W_TYPE>::type W;

// The piece of a block's rows of W that begins at input `start`; zero beyond N and K.
__device__ __forceinline__ void load_piece(Eight<W_TYPE> (&w)[OWN][STEPS], const W* __restrict__ weight,
                                           int first, int start, int N, int K) {
#pragma unroll
  for (int o = 0; o < OWN; o++)
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const int k = start + s * STEP + VALUES * (int)threadIdx.x;
      if (k < K && first + o < N)
        w[o][s].load(weight + (size_t)(first + o) * K + k);
      else
        w[o][s].clear();
    }
}

// acc[token][row of W] += a piece; rows of x beyond T are the last one's.
__device__ __forceinline__ void add_piece(float (&acc)[TOKENS][OWN], const Eight<W_TYPE> (&w)[OWN][STEPS],
                                          const X* x, int token, int start, int T, int K) {
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const int k = start + s * STEP + VALUES * (int)threadIdx.x;
    if (k >= K) continue;
    Eight<X_TYPE> rows[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) rows[t].load(x + (size_t)min(token + t, T - 1) * K + k);
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
        const float v = rows[t][i];
#pragma unroll
        for (int o = 0; o < OWN; o++) acc[t][o] = fmaf(v, w[o][s][i], acc[t][o]);
      }
  }
}

// x [T, K], weight [N, K], both at multiples of 16 bytes, K a multiple of 8 -> y [T, N].
extern "C" __global__ __launch_bounds__(THREADS, 2) void multiply_small(const void* x_at,
                                                                        const void* __restrict__ weight_at,
                                                                        float* __restrict__ y, int T, int N,
                                                                        int K) {
  __shared__ float red[TOKENS * OWN][THREADS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = OWN * blockIdx.x;
  const X* x = reinterpret_cast<const X*>(x_at);
  const W* weight = reinterpret_cast<const W*>(weight_at);
  Eight<W_TYPE> w[OWN][STEPS];
  load_piece(w, weight, first, 0, N, K);
  take_turn();
  for (int token = 0; token < T; token += TOKENS) {
    float acc[TOKENS][OWN] = {};
    if (token && K > PIECE) load_piece(w, weight, first, 0, N, K);
    add_piece(acc, w, x, token, 0, T, K);
    for (int start = PIECE; start < K; start += PIECE) {
      load_piece(w, weight, first, start, N, K);
      add_piece(acc, w, x, token, start, T, K);
    }
    __syncthreads();  // shared memory may still be read from before
#pragma unroll
    for (int v = 0; v < TOKENS * OWN; v++) red[v][threadIdx.x] = acc[v / OWN][v % OWN];
    __syncthreads();
    for (int v = warp; v < TOKENS * OWN; v += WARPS) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < WARPS; i++) sum += red[v][lane + 32 * i];
#pragma unroll
      for (int bit = 16; bit; bit /= 2) sum += __shfl_xor_sync(ALL, sum, bit);
      const int t = token + v / OWN, n = first + v % OWN;
      if (lane == 0 && t < T && n < N) y[(size_t)t * N + n] = sum;
    }
  }
}
