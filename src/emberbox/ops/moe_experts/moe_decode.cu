// The routed experts of a few tokens in three launches: sort and rotate, gate and up, down.
//
// Slots are pairs of a token and one of its experts; sorted by expert they are runs of rows that
// share a matrix. A block multiplies the rows of a run with 128 outputs of one matrix. Of the gate
// and up blocks of the same outputs the later one applies the activation and rotates for down; of
// the down blocks of a token's experts the last one adds them up. All sums run in a fixed order.
#include "experts.cuh"
#include "gemv.cuh"

constexpr int MAX_SLOTS = 256;

struct Runs {  // one array of int: number of runs; expert and first row of each; slot of each row
  int* at;
  __device__ int& count() const { return at[0]; }
  __device__ int& expert(int run) const { return at[1 + run]; }
  __device__ int& first(int run) const { return at[1 + MAX_SLOTS + run]; }
  __device__ int& slot(int row) const { return at[2 + 2 * MAX_SLOTS + row]; }
};

#if LOGITS
// Larger numbers of floats in the order of unsigned integers.
__device__ __forceinline__ u32 ordered(float f) {
  const u32 bits = __float_as_uint(f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr int MAX_EXPERTS = 512, PER_LANE = MAX_EXPERTS / 32;

// The `top` largest of sigmoid(logit) + bias of a token, by one warp; lower experts first among
// equals. All loads are under way at once, and the keys stay in registers: a key of zero is taken.
__device__ __forceinline__ void choose(const float* logits, const float* bias, int num_experts, int top,
                                       float scaling, int* expert, float* weight) {
  const int lane = threadIdx.x & 31;
  float score[PER_LANE], shift[PER_LANE];
  u32 key[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int e = min(lane + 32 * i, num_experts - 1);
    score[i] = logits[e], shift[i] = bias[e];
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    score[i] = 1.f / (1.f + expf(-score[i]));
    key[i] = lane + 32 * i < num_experts ? max(ordered(score[i] + shift[i]), 1u) : 0;
  }
  float total = 0;
  for (int k = 0; k < top; k++) {
    u32 best = 0, which = ALL;
    float value = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (key[i] > best) best = key[i], which = lane + 32 * i, value = score[i];
    const u32 highest = __reduce_max_sync(ALL, best);
    const u32 chosen = __reduce_min_sync(ALL, best == highest ? which : ALL);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane + 32 * i == chosen) key[i] = 0;
    total += value = __shfl_sync(ALL, value, chosen & 31);
    if (lane == 0) expert[k] = chosen, weight[k] = value;
  }
  __syncwarp();
  for (int k = lane; k < top; k += 32) weight[k] *= scaling / (total + 1e-20f);
  __syncwarp();
}
#endif

// x [T, H] -> rotated rows of gate and of up [2, slots, H], in sorted order; runs; weight of a slot.
// Every block sorts for itself; only the first one writes what it found.
extern "C" __global__ __launch_bounds__(THREADS) void sort_and_rotate(
    const void* __restrict__ x, const long long* __restrict__ experts, const float* __restrict__ weights,
    const float* __restrict__ logits, const float* __restrict__ bias, const Matrix* __restrict__ matrices,
    __half* __restrict__ rotated, int* runs_at, float* slot_weights, int tokens, int top, int H,
    int num_experts, float scaling) {
  __shared__ int expert[MAX_SLOTS], position[MAX_SLOTS], is_first[MAX_SLOTS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, s = threadIdx.x, slots = tokens * top;
  take_turn();
#if LOGITS
  __shared__ float weight[MAX_SLOTS];
  for (int t = warp; t < tokens; t += WARPS)
    choose(logits + (size_t)t * num_experts, bias, num_experts, top, scaling, expert + t * top,
           weight + t * top);
#else
  if (s < slots) expert[s] = (int)experts[s];
#endif
  __syncthreads();
  const int mine = s < slots ? expert[s] : -1;
  int before = 0, run = 0;
  bool first = s < slots;
  for (int other = 0; other < slots; other++) {
    const bool earlier = expert[other] == mine && other < s;
    before += expert[other] < mine || earlier;
    first &= !earlier;
  }
  position[s] = before, is_first[s] = first;
  const int count = __syncthreads_count(first);
  if (blockIdx.x == 0 && s < slots) {
    const Runs runs{runs_at};
    runs.slot(before) = s;
#if LOGITS
    slot_weights[s] = weight[s];
#else
    slot_weights[s] = weights[s];
#endif
    for (int other = 0; other < slots; other++) run += is_first[other] && expert[other] < mine;
    if (first) runs.expert(run) = mine, runs.first(run) = before;
    if (s == 0) runs.count() = count, runs.first(count) = slots;
  }
  const int groups = H / GROUP;
  for (int task = blockIdx.x * WARPS + warp; task < 2 * slots * groups; task += gridDim.x * WARPS) {
    const int start = task % groups * GROUP, which = task / groups & 1, slot = task / groups / 2;
    const void* row = reinterpret_cast<const Activation<X_TYPE>::type*>(x) + (size_t)(slot / top) * H;
    const float4 v = read_four<X_TYPE>(row, start + 4 * lane, H);
    const __half* suh = matrices[expert[slot] * MATRICES + which].suh;
    store_swizzled(rotated + ((size_t)which * slots + position[slot]) * H + start,
                   hadamard(times(v, scales(suh + start, lane)), lane), lane);
  }
}

// acc of the rows of a run with outputs out .. out + 127 of a matrix of I inputs.
__device__ __forceinline__ void multiply_run(float (&acc)[ROW_TILES][TILES][4], const Matrix& m,
                                             const __half* rotated, int first, int rows, int out, int I) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const __half* x[ROW_TILES];
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
    const int row = r * ROWS + (lane >> 2);
    x[r] = row < rows ? rotated + (size_t)(first + row) * I + 4 * (lane & 3) : nullptr;
  }
  multiply<RATE, CODEBOOK, ROW_TILES>(acc, m.words + (size_t)out * (I / 16) * (32 * RATE), x, warp, WARPS,
                                  I / GROUP);
}

// rotated [2, slots, H] -> rows of down [slots, W], rotated; W: width of an expert.
// pairs [2, slots, W] and counters [slots, W / 128] carry what the two blocks of a pair exchange.
extern "C" __global__ __launch_bounds__(THREADS, 2) void gate_up(
    const Matrix* __restrict__ matrices, const __half* __restrict__ rotated, const int* __restrict__ runs_at,
    float* pairs, int* counters, __half* __restrict__ inner, int slots, int H, int W, float limit) {
  __shared__ float red[WARPS * ROWS * GROUP];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, groups = W / GROUP;
  const int which = blockIdx.x & 1, out = blockIdx.x / 2 % groups, run = blockIdx.x / 2 / groups;
  take_turn();
  const Runs runs{const_cast<int*>(runs_at)};
  const int first = runs.first(run), rows = runs.first(run + 1) - first, count = runs.count();
  if (run >= count) return;
  const Matrix* expert = matrices + runs.expert(run) * MATRICES;
  if (expert[which].kind != 4 * RATE + CODEBOOK) return;
  float acc[ROW_TILES][TILES][4] = {};
  multiply_run(acc, expert[which], rotated + (size_t)which * slots * H, first, rows, out, H);
  const int start = out * GROUP;
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
    const int row = first + r * ROWS + warp;
    if (r) __syncthreads();
    spread(red, acc[r], rows - r * ROWS);
    __syncthreads();
    if (r * ROWS + warp >= rows) continue;
    const float4 mine =
        times(hadamard(gather(red, warp, lane), lane), scales(expert[which].svh + start, lane));
    auto place = [&](int w) { return pairs + ((size_t)w * slots + row) * W + start; };
    reinterpret_cast<float4*>(place(which))[lane] = mine;
    if (!is_last(counters + row * groups + out, 2, lane)) continue;
    const float4 other = load_written(place(1 - which), lane);
    const float4 g = which ? other : mine, u = which ? mine : other;
    const float4 v = make_float4(activated(g.x, u.x, limit), activated(g.y, u.y, limit),
                                 activated(g.z, u.z, limit), activated(g.w, u.w, limit));
    store_swizzled(inner + (size_t)row * W + start,
                   hadamard(times(v, scales(expert[2].suh + start, lane)), lane), lane);
  }
}

// inner [slots, W] -> y [T, H], the weighted sum over a token's experts.
// parts [slots, H] and counters [T, H / 128] carry what its blocks have.
extern "C" __global__ __launch_bounds__(THREADS, 2) void down(
    const Matrix* __restrict__ matrices, const __half* __restrict__ inner, const int* __restrict__ runs_at,
    const float* __restrict__ slot_weights, float* parts, int* counters, void* __restrict__ y, int top, int H,
    int W) {
  __shared__ float red[WARPS * ROWS * GROUP];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, groups = H / GROUP;
  const int out = blockIdx.x % groups, run = blockIdx.x / groups, start = out * GROUP;
  const Runs runs{const_cast<int*>(runs_at)};
  const int first = runs.first(run), rows = runs.first(run + 1) - first, count = runs.count();
  const Matrix matrix = matrices[runs.expert(min(run, count - 1)) * MATRICES + 2];
  if (run >= count || matrix.kind != 4 * RATE + CODEBOOK) {
    take_turn();  // a kernel that ends has taken its turn: others rely on the one before it too
    return;
  }
  float acc[ROW_TILES][TILES][4] = {};
  multiply_run(acc, matrix, inner, first, rows, out, W);
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
    if (r) __syncthreads();
    spread(red, acc[r], rows - r * ROWS);
    __syncthreads();
    if (r * ROWS + warp >= rows) continue;
    const int slot = runs.slot(first + r * ROWS + warp), token = slot / top;
    const float weight = slot_weights[slot];
    const float4 v =
        times(times(hadamard(gather(red, warp, lane), lane), scales(matrix.svh + start, lane)),
              make_float4(weight, weight, weight, weight));
    reinterpret_cast<float4*>(parts + (size_t)slot * H + start)[lane] = v;
    if (!is_last(counters + token * groups + out, top, lane)) continue;
    const float4 sum = sum_written(
        [&](int k) { return parts + (size_t)(token * top + k) * H + start; }, top, lane);
    void* row = reinterpret_cast<Activation<X_TYPE>::type*>(y) + (size_t)token * H;
    write_four<X_TYPE>(row, start + 4 * lane, H, sum);
  }
}
