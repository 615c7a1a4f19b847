// One token of one row of logits: scores, weights in bins, then a search in the bins that matter.
//
// Scores and their differences from the best are those of the reference, bit for bit. Weights
// exp(difference / temperature) are counted in units of 2^-46 of the largest: sums are exact, so the
// order of additions, the bins and the atomics leave no trace. Nothing waits, whatever the logits.
// X_TYPE: 0 float32, 2 bfloat16 (activations.cuh). Three launches: score, weigh, draw.
#include "activations.cuh"
#include "gemv.cuh"
#include "ranks.cuh"

typedef unsigned char u8;
typedef Activation<X_TYPE> Logit;
constexpr int ITEMS = 4, PIECE = ITEMS * THREADS;  // values of a block
constexpr int MAX_BLOCKS = THREADS;                // 2^18 values: their weights do not overflow
constexpr double BINS_PER_UNIT = 62;               // a distance of 32.6 or more weighs nothing
constexpr double ONE = 70368744177664.;            // 2^46
constexpr double MAX_SCORE = 1e300;

// Working memory. `size` is a multiple of PIECE.
struct Memory {
  u64 *score, *mass;  // [size] a score, later the bits of its distance from the best; a weight
  Lists lists;        // [size]; from bin_mass to `kept` all is zero before `weigh`
  int* bin_filled;    // [BINS]
  u64* kept;          // [1] what min_p keeps
  double* best;       // [MAX_BLOCKS] of a block
  int* best_id;       // [MAX_BLOCKS]

  __device__ Memory(u64* at, int size) {
    score = at, mass = score + size;
    lists.far = mass + size, lists.mass = lists.far + size;
    lists.id = reinterpret_cast<int*>(lists.mass + size);
    lists.bin_mass = lists.mass + size + size / 2;
    lists.bin_count = reinterpret_cast<int*>(lists.bin_mass + BINS);
    bin_filled = lists.bin_count + BINS;
    kept = lists.bin_mass + 2 * BINS;
    best = reinterpret_cast<double*>(kept + 1);
    best_id = reinterpret_cast<int*>(best + MAX_BLOCKS);
  }
};

__device__ __forceinline__ double number(int low, int high) { return __hiloint2double(high, low); }
__device__ __forceinline__ double value_of(u64 bits) { return __longlong_as_double((long long)bits); }
__device__ __forceinline__ double lowest() { return value_of(0xfff0000000000000ull); }  // -infinity

__device__ __forceinline__ int bin_of(u64 far) {
  return min(BINS - 1, (int)(value_of(far) * BINS_PER_UNIT));
}

// -- scores --------------------------------------------------------------------------------------

struct Best {
  double value = lowest();
  int id = 0x7fffffff;

  __device__ __forceinline__ void add(double v, int i) {
    if (v > value || (v == value && i < id)) value = v, id = i;
  }
};

// The best of a block, for all its threads; of equal ones the lowest id. NaN is never the best.
__device__ __forceinline__ Best best_of_block(Best own) {
  __shared__ double values[WARPS];
  __shared__ int ids[WARPS];
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2)
    own.add(__shfl_xor_sync(ALL, own.value, bit), __shfl_xor_sync(ALL, own.id, bit));
  if ((threadIdx.x & 31) == 0) values[threadIdx.x >> 5] = own.value, ids[threadIdx.x >> 5] = own.id;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) own.add(values[w], ids[w]);
  return own;
}

// The reference's order of operations, none of them contracted.
__device__ __forceinline__ double penalised(double s, int i, const double* bias, const u8* is_seen,
                                            const double* counts, const u8* is_banned,
                                            double repetition, double presence, double frequency) {
  if (bias) s = __dadd_rn(s, bias[i]);
  if (is_seen) {
    if (is_seen[i]) s = s > 0 ? __ddiv_rn(s, repetition) : __dmul_rn(s, repetition);
    s = s > MAX_SCORE ? MAX_SCORE : s < -MAX_SCORE ? -MAX_SCORE : s;
  }
  if (counts) {
    const double count = counts[i], present = count > 0 ? presence : 0.;
    s = __dsub_rn(s, __dadd_rn(present, __dmul_rn(frequency, count)));
  }
  return is_banned && is_banned[i] ? lowest() : s;
}

extern "C" __global__ __launch_bounds__(THREADS) void score(
    const void* logits, const double* bias, const u8* is_seen, const double* counts,
    const u8* is_banned, u64* memory, int size, int repetition_low, int repetition_high,
    int presence_low, int presence_high, int frequency_low, int frequency_high) {
  const Memory m(memory, gridDim.x * PIECE);
  const double repetition = number(repetition_low, repetition_high);
  const double presence = number(presence_low, presence_high);
  const double frequency = number(frequency_low, frequency_high);
  take_turn();
  for (int i = blockIdx.x * THREADS + threadIdx.x; i <= 2 * BINS; i += gridDim.x * THREADS)
    m.lists.bin_mass[i] = 0;
  Best best;
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    const int i = blockIdx.x * PIECE + item * THREADS + threadIdx.x;
    if (i >= size) continue;
    const double raw = Logit::read(reinterpret_cast<const Logit::type*>(logits)[i]);
    const double s = penalised(raw, i, bias, is_seen, counts, is_banned, repetition, presence, frequency);
    m.score[i] = (u64)__double_as_longlong(s);
    best.add(s, i);
  }
  best = best_of_block(best);
  if (threadIdx.x == 0) m.best[blockIdx.x] = best.value, m.best_id[blockIdx.x] = best.id;
}

__device__ __forceinline__ Best best_of_all(const Memory& m, int blocks) {
  Best best;
  if ((int)threadIdx.x < blocks) best.add(m.best[threadIdx.x], m.best_id[threadIdx.x]);
  return best_of_block(best);
}

// The token of the best score, by one block.
extern "C" __global__ __launch_bounds__(THREADS) void pick(u64* memory, long long* token, int blocks,
                                                           int size) {
  take_turn();
  const Best best = best_of_all(Memory(memory, blocks * PIECE), blocks);
  if (threadIdx.x == 0) *token = best.id < size ? best.id : 0;
}

// -- weights -------------------------------------------------------------------------------------

extern "C" __global__ __launch_bounds__(THREADS) void weigh(
    u64* memory, int size, int temperature_low, int temperature_high, int min_p_low, int min_p_high) {
  __shared__ Bins<BINS> bins;
  const Memory m(memory, gridDim.x * PIECE);
  const double temperature = number(temperature_low, temperature_high);
  const double min_p = number(min_p_low, min_p_high);
  bins.clear();
  take_turn();
  const double best = best_of_all(m, gridDim.x).value;  // and the bins are clear
  u64 kept = 0;
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    const int i = blockIdx.x * PIECE + item * THREADS + threadIdx.x;
    if (i >= size) continue;
    const double scaled = __ddiv_rn(__dsub_rn(value_of(m.score[i]), best), temperature);
    const double weight = exp(scaled);
    // What is not a number weighs nothing.
    const u64 mass = weight <= 1 ? __double2ull_rn(weight * ONE) : 0;
    const u64 far = (u64)__double_as_longlong(fabs(scaled));
    m.score[i] = far, m.mass[i] = mass;
    if (mass) bins.add(bin_of(far), mass);
    if (weight >= min_p) kept += mass;
  }
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) kept += __shfl_xor_sync(ALL, kept, bit);
  if ((threadIdx.x & 31) == 0 && kept) atomicAdd(m.kept, kept);
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS)
    if (bins.count[b]) {
      atomicAdd(m.lists.bin_count + b, (int)bins.count[b]);
      atomicAdd(m.lists.bin_mass + b, bins.mass(b));
    }
}

// -- the search ----------------------------------------------------------------------------------

// Everything that weighs into lists by bins. offsets: of the lists.
__device__ __forceinline__ void fill_lists(const Memory& m, int size, const int* offsets, int* filled) {
  int bin[ITEMS], rank[ITEMS];
  u64 far[ITEMS], mass[ITEMS];
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    const int i = blockIdx.x * PIECE + item * THREADS + threadIdx.x;
    far[item] = i < size ? m.score[i] : 0, mass[item] = i < size ? m.mass[i] : 0;
    bin[item] = mass[item] ? bin_of(far[item]) : 0;
    if (mass[item]) rank[item] = atomicAdd(&filled[bin[item]], 1);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS)
    if (filled[b]) filled[b] = offsets[b] + atomicAdd(m.bin_filled + b, filled[b]);
  __syncthreads();
#pragma unroll
  for (int item = 0; item < ITEMS; item++)
    if (mass[item]) {
      const int at = filled[bin[item]] + rank[item];
      m.lists.far[at] = far[item], m.lists.mass[at] = mass[item];
      m.lists.id[at] = blockIdx.x * PIECE + item * THREADS + threadIdx.x;
    }
}

__device__ __forceinline__ bool is_last_block(int* arrived) {
  __shared__ bool is_mine;
  __threadfence();
  __syncthreads();
  if (threadIdx.x < 32) {
    const bool last = is_last(arrived, gridDim.x, threadIdx.x);
    if (threadIdx.x == 0) is_mine = last;
  }
  __syncthreads();
  return is_mine;
}

enum { TOP_K, TOP_P, TOKEN };  // what is looked for, one after the other

// top_k 0: no limit.
extern "C" __global__ __launch_bounds__(THREADS, 2) void draw(
    u64* memory, long long* token, int* arrived, int size, int top_k, int top_p_low, int top_p_high,
    int uniform_low, int uniform_high) {
  __shared__ int offsets[BINS], filled[BINS];
  __shared__ Shared s;
  const Memory m(memory, gridDim.x * PIECE);
  for (int b = threadIdx.x; b < BINS; b += THREADS) filled[b] = 0;
  take_turn();
  const Own own = own_bins(m.lists);
  int offset = (int)own.count_before;
#pragma unroll
  for (int bin = threadIdx.x * OWN; bin < (threadIdx.x + 1) * OWN; bin++)
    offsets[bin] = offset, offset += __ldcg(m.lists.bin_count + bin);
  __syncthreads();
  fill_lists(m, size, offsets, filled);
  if (!is_last_block(arrived)) return;

  if (threadIdx.x == THREADS - 1)
    s.least_far = own.mass_before + own.mass, s.least_id = own.count_before + own.count;
  __syncthreads();
  const double top_p = number(top_p_low, top_p_high), uniform = number(uniform_low, uniform_high);
  const u64 count = s.least_id;
  u64 total = s.least_far, mass = min(total, __ldcg(m.kept));
  Found found;
#pragma unroll 1  // find() is large
  for (int step = top_k > 0 && (u64)top_k < count ? TOP_K : TOP_P; step <= TOKEN; step++) {
    if (step == TOP_P && top_p >= 1) continue;
    u64 target = top_k - 1;
    // Those before the last one that stays hold less than the share; the first always stays.
    if (step == TOP_P) target = max(__double2ull_ru(top_p * (double)total), 1ull) - 1;
    if (step == TOKEN) target = __double2ull_rd(uniform * (double)mass);
    if (step != TOP_K) target = min(target, (step == TOP_P ? total : mass) - 1);
    found = find(s, m.lists, own, step == TOP_K, target);
    if (step == TOP_K) total = found.through;
    if (step != TOKEN) mass = min(mass, found.through);
  }
  if (threadIdx.x == 0) *token = found.id;
}
