// Search by rank among weighed tokens that lie in lists, one list for each bin of distances: which is
// the first with which their number, or their mass, goes beyond a target? By one block, without a
// sort. Sums are of integers: the order within a list, and of additions, leaves no trace.
#pragma once
#include "gemv.cuh"

typedef unsigned long long u64;
constexpr int BINS = 2048, OWN = BINS / THREADS;  // bins of a thread
constexpr int MAX_ROUNDS = 16;  // 11 are enough: 8 bits each, of 64 of a distance and 18 of an id

// Tokens rank by `far`, the bits of a distance from the best that is not negative, then by id. No
// token of a bin ranks before one of a bin before. The lists follow one another.
struct Lists {
  u64 *far, *mass;  // of every token that weighs anything
  int* id;
  u64* bin_mass;    // [BINS] sums
  int* bin_count;   // [BINS] lengths
};

// Counts and sums of weights by bins in shared memory. Sums in two words: 64 bits have no fast add.
template <int SIZE>
struct Bins {
  u32 count[SIZE], low[SIZE], high[SIZE];

  __device__ __forceinline__ void clear() {
    for (int b = threadIdx.x; b < SIZE; b += THREADS) count[b] = low[b] = high[b] = 0;
  }
  __device__ __forceinline__ void add(int bin, u64 mass) {
    const u32 by = (u32)mass, before = atomicAdd(&low[bin], by);
    const u32 carry = before + by < before;
    atomicAdd(&count[bin], 1u), atomicAdd(&high[bin], (u32)(mass >> 32) + carry);
  }
  __device__ __forceinline__ u64 mass(int bin) const { return (u64)high[bin] << 32 | low[bin]; }
};

// The sum over the threads before this one.
__device__ __forceinline__ u64 sum_before(u64 value) {
  __shared__ u64 sums[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64 sum = value;
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    const u64 other = __shfl_up_sync(ALL, sum, bit);
    if (lane >= bit) sum += other;
  }
  __syncthreads();  // all have read the sums of a call before
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  sum -= value;
#pragma unroll
  for (int w = 0; w < WARPS; w++)
    if (w < warp) sum += sums[w];
  return sum;
}

// Tokens of one bin that may still be the one that is looked for.
struct Range {
  int begin, end, left;      // places in the list; how many of them are candidates
  u64 first_far, last_far;   // of candidates
  u64 first_id, last_id;     // of candidates
  u64 target, mass;          // measure to go beyond; mass of all before the first candidate
};

struct Found {
  u64 through;  // mass of the token and all before it
  int id;
};

struct Shared {
  Range range;
  Found found;
  u64 least_far, most_far, least_id, most_id;
  int held;
  union {
    Bins<THREADS> bins;
    struct {
      u64 far[THREADS], mass[THREADS];
      int id[THREADS];
    } few;
  };
};

// The OWN neighbouring bins of a thread, all together and all before them.
struct Own {
  u64 mass, mass_before, count, count_before;
};

__device__ __forceinline__ Own own_bins(const Lists& m) {
  Own own = {0, 0, 0, 0};
#pragma unroll
  for (int bin = threadIdx.x * OWN; bin < (threadIdx.x + 1) * OWN; bin++)
    own.mass += __ldcg(m.bin_mass + bin), own.count += __ldcg(m.bin_count + bin);
  own.count_before = sum_before(own.count), own.mass_before = sum_before(own.mass);
  return own;
}

// The bin in which the measure (number or mass of tokens) goes beyond the target: one thread has it.
__device__ __forceinline__ void choose_bin(Shared& s, const Lists& m, const Own& own, bool by_count,
                                           u64 target) {
  u64 measure = by_count ? own.count_before : own.mass_before, mass = own.mass_before;
  if (target < measure || target - measure >= (by_count ? own.count : own.mass)) return;
  int begin = (int)own.count_before;
#pragma unroll
  for (int bin = threadIdx.x * OWN; bin < (threadIdx.x + 1) * OWN; bin++) {
    const u64 bin_mass = __ldcg(m.bin_mass + bin);
    const int count = __ldcg(m.bin_count + bin);
    const u64 more = by_count ? (u64)count : bin_mass;
    if (measure <= target && target - measure < more)
      s.range = {begin, begin + count, count, 0, ~0ull, 0, ~0ull, target - measure, mass};
    measure += more, mass += bin_mass, begin += count;
  }
}

// Calls use(far, mass, id) for this thread's share of the candidates.
template <typename Use>
__device__ __forceinline__ void each_candidate(const Lists& m, const Range& range, Use use) {
  for (int i = range.begin + threadIdx.x; i < range.end; i += THREADS) {
    const u64 far = __ldcg(m.far + i), id = __ldcg(m.id + i);
    if (far >= range.first_far && far <= range.last_far && id >= range.first_id && id <= range.last_id)
      use(far, __ldcg(m.mass + i), id);
  }
}

// Splits the candidates in up to 256 parts by difference, or by id if they differ in nothing else.
__device__ __forceinline__ void narrow(Shared& s, const Lists& m, bool by_count) {
  if (threadIdx.x == 0) s.least_far = s.least_id = ~0ull, s.most_far = s.most_id = 0;
  s.bins.clear();
  const Range range = s.range;
  __syncthreads();
  u64 least_far = ~0ull, most_far = 0, least_id = ~0ull, most_id = 0;
  each_candidate(m, range, [&](u64 far, u64, u64 id) {
    least_far = min(least_far, far), most_far = max(most_far, far);
    least_id = min(least_id, id), most_id = max(most_id, id);
  });
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    least_far = min(least_far, __shfl_xor_sync(ALL, least_far, bit));
    most_far = max(most_far, __shfl_xor_sync(ALL, most_far, bit));
    least_id = min(least_id, __shfl_xor_sync(ALL, least_id, bit));
    most_id = max(most_id, __shfl_xor_sync(ALL, most_id, bit));
  }
  if ((threadIdx.x & 31) == 0) {
    atomicMin(&s.least_far, least_far), atomicMax(&s.most_far, most_far);
    atomicMin(&s.least_id, least_id), atomicMax(&s.most_id, most_id);
  }
  __syncthreads();
  const bool by_id = s.least_far == s.most_far;
  const u64 least = by_id ? s.least_id : s.least_far, span = (by_id ? s.most_id : s.most_far) - least;
  const int shift = max(0, 64 - __clzll((long long)span) - 8);
  each_candidate(m, range, [&](u64 far, u64 mass, u64 id) {
    s.bins.add((int)(((by_id ? id : far) - least) >> shift) & (THREADS - 1), mass);
  });
  __syncthreads();
  const u64 mass = s.bins.mass(threadIdx.x), count = s.bins.count[threadIdx.x];
  const u64 measure = by_count ? count : mass, mass_before = sum_before(mass);
  const u64 before = by_count ? sum_before(count) : mass_before;
  if (before <= range.target && range.target - before < measure) {
    const u64 first = least + ((u64)threadIdx.x << shift), last = first + (1ull << shift) - 1;
    s.range.left = (int)count;
    s.range.target = range.target - before, s.range.mass = range.mass + mass_before;
    if (by_id)
      s.range.first_id = first, s.range.last_id = last;
    else
      s.range.first_far = first, s.range.last_far = last;
  }
  __syncthreads();
}

// Among up to 256 candidates: each thread adds up what ranks no later than its own.
__device__ __forceinline__ void choose(Shared& s, const Lists& m, bool by_count) {
  if (threadIdx.x == 0) s.held = 0;
  const Range range = s.range;
  __syncthreads();
  each_candidate(m, range, [&](u64 far, u64 mass, u64 id) {
    const int at = atomicAdd(&s.held, 1);
    if (at < THREADS) s.few.far[at] = far, s.few.mass[at] = mass, s.few.id[at] = (int)id;
  });
  __syncthreads();
  const int held = min(s.held, THREADS), own = threadIdx.x;
  if (own >= held) return;
  const u64 far = s.few.far[own];
  const int id = s.few.id[own];
  u64 mass = 0, count = 0;
  for (int i = 0; i < held; i++)
    if (s.few.far[i] < far || (s.few.far[i] == far && s.few.id[i] <= id)) mass += s.few.mass[i], count++;
  const u64 through = by_count ? count : mass, measure = by_count ? 1 : s.few.mass[own];
  if (through > range.target && through - measure <= range.target) s.found = {range.mass + mass, id};
}

// The first token by rank with which the number or the mass of tokens goes beyond the target; token 0
// and no mass if there is none. All threads of the block together.
__device__ __forceinline__ Found find(Shared& s, const Lists& m, const Own& own, bool by_count,
                                      u64 target) {
  __syncthreads();  // all have read what was found before
  if (threadIdx.x == 0) s.range = {0, 0, 0, 0, 0, 0, 0, 0, 0}, s.found = {0, 0};
  __syncthreads();
  choose_bin(s, m, own, by_count, target);
  __syncthreads();
  for (int round = 0; round < MAX_ROUNDS; round++) {
    const int left = s.range.left;
    __syncthreads();
    if (left <= THREADS) break;
    narrow(s, m, by_count);
  }
  choose(s, m, by_count);
  __syncthreads();
  return s.found;
}
