// Accepted drafts of every layer and sequence: S <- diag(exp gate) S + k (x) delta, and the history.
// Two blocks for each head; a warp has 8 rows of the state, each of its lanes 4 columns of them.
#include "activations.cuh"
#include "gemv.cuh"

typedef Activation<X_TYPE>::type X;
constexpr int D = 128, OWN = 8, HALVES = D / (WARPS * OWN);

// Shapes as in the op's contract; T = B M rows, N slots. grid: L B H HALVES.
extern "C" __global__ __launch_bounds__(THREADS) void kda_apply(
    float* states, X* history, const X* pending_conv, const float* pending_k, const float* pending_gate,
    const float* pending_deltas, const int* slots, const int* accepted, int B, int M, int H, int N) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int half = blockIdx.x % HALVES, h = blockIdx.x / HALVES % H, b = blockIdx.x / HALVES / H % B;
  const size_t layer = blockIdx.x / HALVES / H / B, first = layer * B * M + b * M + 1;
  take_turn();
  const int count = min(accepted[b], M - 1);
  if (count <= 0) return;
  const size_t at = layer * N + slots[b];
  const int row = (half * WARPS + warp) * OWN;
  float4* const state = reinterpret_cast<float4*>(states + ((at * H + h) * D + row) * D) + lane;
  float4 s[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) s[i] = __ldcs(state + i * (D / 4));
  for (int t = 0; t < count; t++) {
    const size_t start = ((first + t) * H + h) * D;
    const float4 delta = reinterpret_cast<const float4*>(pending_deltas + start)[lane];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float by = expf(pending_gate[start + row + i]), k = pending_k[start + row + i];
      s[i] = make_float4(s[i].x * by + k * delta.x, s[i].y * by + k * delta.y, s[i].z * by + k * delta.z,
                         s[i].w * by + k * delta.w);
    }
  }
#pragma unroll
  for (int i = 0; i < OWN; i++) __stcs(state + i * (D / 4), s[i]);

  // The last three of the three inputs held and the accepted ones.
  const size_t C = (size_t)3 * H * D;
  for (int c = half * THREADS + threadIdx.x; c < 3 * D; c += HALVES * THREADS) {
    const size_t channel = (size_t)(c / D * H + h) * D + c % D;
    X* const past = history + at * 3 * C + channel;
    X kept[3];
#pragma unroll
    for (int j = 0; j < 3; j++)
      kept[j] = count + j < 3 ? past[(count + j) * C] : pending_conv[(first + count + j - 3) * C + channel];
#pragma unroll
    for (int j = 0; j < 3; j++) past[j * C] = kept[j];
  }
}
