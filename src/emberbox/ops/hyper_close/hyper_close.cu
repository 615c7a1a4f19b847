// After the last sublayer: a block for each token, its mean stream in shared memory.
#include "gemv.cuh"
#include "streams.cuh"

// A lane's four columns of the mean stream, updated where there is a result y0 (+ y1).
__device__ __forceinline__ float4 mean_of_streams(const void* streams, const void* y0, const void* y1,
                                                  const Spreading (&spreading)[STREAMS], int token,
                                                  int column, int H) {
  typename Four<X_TYPE>::type x[STREAMS];
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int s = 0; s < STREAMS; s++)
    x[s] = __ldcg(place_of<X_TYPE>(streams, (token * STREAMS + s) * H + column));
  if (y0) {
    const float4 y = load_result<X_TYPE>(y0, y1, token * H + column);
#pragma unroll
    for (int s = 0; s < STREAMS; s++) add_times(sum, 1, spreading[s].apply<X_TYPE>(x, y));
  } else {
#pragma unroll
    for (int s = 0; s < STREAMS; s++) add_times(sum, 1, Four<X_TYPE>::unpack(x[s]));
  }
  constexpr float share = 1.f / STREAMS;
  return rounded<X_TYPE>(make_float4(sum.x * share, sum.y * share, sum.z * share, sum.w * share));
}

// rotated [num_suhs, T, H]; post and mix are not read where there is no result.
extern "C" __global__ __launch_bounds__(THREADS) void close_streams(
    const void* streams, const void* y0, const void* y1, const float* post, const float* mix,
    const void* norm, const __half* suh0, const __half* suh1, const __half* suh2, void* hidden,
    __half* rotated, int T, int H, int num_suhs, float eps) {
  extern __shared__ float4 means[];  // [H / 4]
  __shared__ float squares[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.x;
  take_turn();
  const float* of_results = y0 ? post + token * STREAMS : nullptr;
  const float* of_streams = y0 ? mix + token * STREAMS * STREAMS : nullptr;
  Spreading spreading[STREAMS];
#pragma unroll
  for (int s = 0; s < STREAMS; s++)
    if (y0) spreading[s] = Spreading(of_results + s, of_streams + s);
  float square = 0;
#pragma unroll 2
  for (int column = 4 * threadIdx.x; column < H; column += 4 * THREADS) {
    const float4 v = mean_of_streams(streams, y0, y1, spreading, token, column, H);
    means[column / 4] = v;
    square += dot(v, v);
  }
#pragma unroll
  for (int bit = 16; bit; bit /= 2) square += __shfl_xor_sync(ALL, square, bit);
  if (lane == 0) squares[warp] = square;
  __syncthreads();
  square = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) square += squares[w];
  const float inverse_rms = rsqrtf(square / H + eps);
  const __half* const suhs[3] = {suh0, suh1, suh2};
  for (int start = warp * GROUP; start < H; start += WARPS * GROUP) {
    const int column = start + 4 * lane;
    float4 v = means[column / 4];
    v = make_float4(v.x * inverse_rms, v.y * inverse_rms, v.z * inverse_rms, v.w * inverse_rms);
    v = rounded<X_TYPE>(times(v, load_four<NORM_TYPE>(norm, column)));
    store_four<X_TYPE>(hidden, token * H + column, v);
#pragma unroll
    for (int i = 0; i < 3; i++)
      if (i < num_suhs)
        store_swizzled(rotated + (i * T + token) * H + start,
                       hadamard(times(v, scales(suhs[i] + start, lane)), lane), lane);
  }
}
