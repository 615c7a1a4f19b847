// The best pools of paged keys for each row (a new token): `score` gives a sortable number to every
// pool that is complete at the row, `choose` names the rows' tokens. Macro X_TYPE: of the keys.
//
// Pools are the 16 rows of a tensor instruction and heads its 8 columns. A query is three bf16 parts,
// a float32 key too, so that products are those of float32. Channels take places in an instruction as
// the lanes load them: lane 4 g + quad holds channels 32 l + 8 quad .. + 7 of key g or head g.
#include "gemv.cuh"
#include "activations.cuh"

constexpr int DIM = 128, LOADS = 4, PAGE = 64;
constexpr int PARTS = 3, KEY_PARTS = X_TYPE == FLOAT32 ? 3 : 1;
constexpr int MOST_TILES = X_TYPE == FLOAT32 ? 1 : 2;  // of 16 pools, of a warp
constexpr int CHOOSERS = 1024, DIGITS = 2048;

__device__ __forceinline__ void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two numbers as bf16, the first in the low half; what rounding took away stays.
__device__ __forceinline__ u32 take_part(float& first, float& second) {
  const __nv_bfloat162 part = __floats2bfloat162_rn(first, second);
  first -= __low2float(part), second -= __high2float(part);
  return *reinterpret_cast<const u32*>(&part);
}

// Eight channels as N bf16 parts, the largest first.
template <int N>
__device__ __forceinline__ void split(const float* __restrict__ at, uint4 (&parts)[N]) {
  float4 a = __ldcg(reinterpret_cast<const float4*>(at)), b = __ldcg(reinterpret_cast<const float4*>(at) + 1);
#pragma unroll
  for (int i = 0; i < N; i++) {
    parts[i].x = take_part(a.x, a.y), parts[i].y = take_part(a.z, a.w);
    parts[i].z = take_part(b.x, b.y), parts[i].w = take_part(b.z, b.w);
  }
}

// Where a sequence stands: its first token of the launch, and how many are real.
struct Sequence {
  int position, count;
  int end;  // of its tiles, among those of all sequences

  // Tokens up to and with token m; 0 if that is not real.
  __device__ __forceinline__ int tokens(int m) const { return m < count ? position + m + 1 : 0; }
};

struct Rows {
  const int *positions, *counts, *table;
  int num_sequences, num_tokens, first, num_rows;  // rows are tokens first .. first + num_rows - 1
  int num_pages, stride, pool, best;

  __device__ __forceinline__ Sequence of(int b) const { return {__ldcg(positions + b), __ldcg(counts + b), 0}; }
  __device__ __forceinline__ const int* pages(int b) const { return table + (size_t)b * num_pages; }
  // Pools to score for the last of the rows that are real tokens; 0 where no row has to choose.
  __device__ __forceinline__ int pools(const Sequence& own) const {
    const int last = min(own.count, first + num_rows), complete = last > first ? (own.position + last) / pool : 0;
    return complete > best ? complete : 0;
  }
};

// Tiles of `size` pools in all sequences together. The whole block.
__device__ int count_tiles(const Rows& rows, int size, Sequence* sequences) {
  const int lane = threadIdx.x & 31;
  __syncthreads();
  if (threadIdx.x < 32) {
    int total = 0;
    for (int start = 0; start < rows.num_sequences; start += 32) {
      const int b = start + lane;
      Sequence own{0, 0, 0};
      if (b < rows.num_sequences) own = rows.of(b);
      int sum = (rows.pools(own) + size - 1) / size;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += other;
      }
      own.end = total + sum;
      if (b < rows.num_sequences) sequences[b] = own;
      total += __shfl_sync(ALL, sum, 31);
    }
  }
  __syncthreads();
  return sequences[rows.num_sequences - 1].end;
}

// Keys of 16 TILES pools as the first operand: of tile i, word w of keys g + 8 half.
template <int TILES>
struct Keys {
  uint4 words[TILES][2][LOADS][KEY_PARTS];

  __device__ __forceinline__ void load(const Rows& rows, const void* __restrict__ pooled, int b, int start, int end) {
    const int lane = threadIdx.x & 31, in_page = PAGE / rows.pool;
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
      const int p = start + 8 * i + lane / 4;
      const bool is_there = p < end;
      const size_t page = is_there ? __ldcg(rows.pages(b) + p / in_page) : 0;
      const size_t at = (page * in_page + p % in_page) * DIM + 8 * (lane & 3);
#pragma unroll
      for (int l = 0; l < LOADS; l++) {
        auto& out = words[i / 2][i % 2][l];
#pragma unroll
        for (int part = 0; part < KEY_PARTS; part++) out[part] = make_uint4(0, 0, 0, 0);
        if (!is_there) continue;
        if constexpr (X_TYPE == FLOAT32)
          split(reinterpret_cast<const float*>(pooled) + at + 32 * l, out);
        else
          out[0] = __ldcg(reinterpret_cast<const uint4*>(reinterpret_cast<const __half*>(pooled) + at + 32 * l));
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&c)[TILES][4], int l, int part, uint4 q) const {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const uint4 low = words[i][0][l][part], high = words[i][1][l][part];
      multiply_add(c[i], low.x, high.x, low.y, high.y, q.x, q.y);
      multiply_add(c[i], low.z, high.z, low.w, high.w, q.z, q.w);
    }
  }
};

// A row's queries and head weights, to shared memory: query[part][8 heads][l][lane].
__device__ void stage(const float* __restrict__ q, const float* __restrict__ weights, int heads, uint4* query, float* shares) {
  __syncthreads();
  const int slots = heads * (DIM / 8);
#pragma unroll 2
  for (int slot = threadIdx.x; slot < slots; slot += THREADS) {
    const int lane = slot & 31, l = slot / 32 % LOADS, head = slot / (32 * LOADS) * 8 + lane / 4;
    uint4 parts[PARTS];
    split(q + head * DIM + 32 * l + 8 * (lane & 3), parts);
#pragma unroll
    for (int part = 0; part < PARTS; part++) query[part * slots + slot] = parts[part];
  }
  for (int head = threadIdx.x; head < heads; head += THREADS) shares[head] = __ldcg(weights + head);
  __syncthreads();
}

// sums[2 i + half]: the scores of keys 16 i + 8 half + g without D^-1/2; the same in all four lanes of g.
template <int TILES>
__device__ __forceinline__ void add_heads(const Keys<TILES>& keys, const uint4* query, const float* shares, int heads,
                                          float (&sums)[2 * TILES]) {
  const int lane = threadIdx.x & 31, slots = heads * (DIM / 8);
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) sums[i] = 0.f;
#pragma unroll 1
  for (int head = 0; head < heads; head += 16) {
    float c[2][TILES][4] = {};
#pragma unroll
    for (int part = PARTS - 1; part >= 0; part--)  // the smallest first
#pragma unroll
      for (int l = 0; l < LOADS; l++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const uint4 now = query[part * slots + (head + 8 * n) * (DIM / 8) + 32 * l + lane];
#pragma unroll
          for (int own = KEY_PARTS - 1; own >= 0; own--)
            if (part + own < PARTS) keys.multiply(c[n], l, own, now);
        }
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float2 share = *reinterpret_cast<const float2*>(shares + head + 8 * n + 2 * (lane & 3));
#pragma unroll
      for (int i = 0; i < 2 * TILES; i++) {
        const float a = c[n][i / 2][i % 2 * 2], b = c[n][i / 2][i % 2 * 2 + 1];
        sums[i] += share.x * fmaxf(a, 0.f) + share.y * fmaxf(b, 0.f);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    sums[i] += __shfl_xor_sync(ALL, sums[i], 1);
    sums[i] += __shfl_xor_sync(ALL, sums[i], 2);
  }
}

// Larger for a larger score; both zeros are the same, and what is not a number is the largest.
__device__ __forceinline__ u32 sortable(float score) {
  if (score != score) return ~0u;
  const u32 bits = __float_as_uint(score == 0.f ? 0.f : score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The tiles of all sequences, each for a group of rows, in turn by the blocks of the grid.
template <int TILES>
__device__ __forceinline__ void score_tiles(const Rows& rows, const float* q, const float* weights, const void* pooled,
                                            u32* out, int heads, int num_tiles, const Sequence* sequences, uint4* query,
                                            float* shares) {
  constexpr int size = 16 * TILES * WARPS;
  const int lane = threadIdx.x & 31, quad = lane & 3;
  const int num_groups = min(rows.num_rows, max(1, (int)gridDim.x / num_tiles));
  const int per_group = (rows.num_rows + num_groups - 1) / num_groups;
  int b = 0, staged = -1;
  for (int item = blockIdx.x; item < num_tiles * num_groups; item += gridDim.x) {
    const int tile = item / num_groups, group = item % num_groups;
    while (tile >= sequences[b].end) b++;
    const Sequence here = sequences[b];
    const int start = (tile - (b ? sequences[b - 1].end : 0)) * size;
    const int of_warp = start + (threadIdx.x >> 5) * 16 * TILES;
    Keys<TILES> keys;
    keys.load(rows, pooled, b, of_warp, rows.pools(here));
    const int stop = min(rows.num_rows, (group + 1) * per_group);
    for (int i = group * per_group; i < stop; i++) {
      const int complete = here.tokens(rows.first + i) / rows.pool;
      if (complete <= rows.best || start >= complete) continue;  // the same in the whole block
      const int row = b * rows.num_tokens + rows.first + i;
      if (row != staged) stage(q + (size_t)row * heads * DIM, weights + (size_t)row * heads, heads, query, shares);
      staged = row;
      float sums[2 * TILES];
      add_heads(keys, query, shares, heads, sums);
      u32* own = out + ((size_t)b * rows.num_rows + i) * rows.stride;
      float score = sums[0];
#pragma unroll
      for (int j = 1; j < 2 * TILES; j++) score = quad == j ? sums[j] : score;
      const int p = of_warp + 8 * quad + lane / 4;
      if (quad < 2 * TILES && p < complete) own[p] = sortable(score);
    }
  }
}

// out [sequences x rows, stride]: of every pool that is complete at a row, where there are more than
// the best. Shared memory: queries, head weights, sequences.
extern "C" __global__ void __launch_bounds__(THREADS, X_TYPE == FLOAT32 ? 1 : 2)
    score(const float* q, const float* weights, const void* pooled, const int* positions, const int* counts,
          const int* table, u32* out, int num_sequences, int num_tokens, int first, int num_rows, int num_pages,
          int stride, int pool, int best, int heads) {
  extern __shared__ uint4 query[];
  float* shares = reinterpret_cast<float*>(query + PARTS * heads * (DIM / 8));
  Sequence* sequences = reinterpret_cast<Sequence*>(shares + heads);
  const Rows rows{positions, counts, table, num_sequences, num_tokens, first, num_rows, num_pages, stride, pool, best};
  take_turn();
  constexpr int size = 16 * WARPS;
  int num_tiles = count_tiles(rows, MOST_TILES * size, sequences);
  if (num_tiles == 0) return;
  if (MOST_TILES == 1 || num_tiles >= (int)gridDim.x) {
    score_tiles<MOST_TILES>(rows, q, weights, pooled, out, heads, num_tiles, sequences, query, shares);
  } else {
    num_tiles = count_tiles(rows, size, sequences);
    score_tiles<1>(rows, q, weights, pooled, out, heads, num_tiles, sequences, query, shares);
  }
}

// The sum of v over the threads before this one, and over all. Of two calls in a row, each has its
// own 32 words: one barrier is enough.
__device__ __forceinline__ u32 sum_before(u32 v, u32* sums, u32& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  auto scan = [&](u32 sum) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(ALL, sum, step);
      if (lane >= step) sum += other;
    }
    return sum;
  };
  const u32 up_to = scan(v);
  if (lane == 31) sums[warp] = up_to;
  __syncthreads();
  const u32 warps = scan(sums[lane]);
  total = __shfl_sync(ALL, warps, 31);
  const u32 before = __shfl_sync(ALL, warps, max(warp - 1, 0));
  return up_to - v + (warp ? before : 0);
}

// Keys 4 at .. 4 at + 3 of a row, zero from `end` on.
__device__ __forceinline__ uint4 keys_at(const u32* keys, int at, int end) {
  if (4 * at >= end) return make_uint4(0, 0, 0, 0);
  uint4 v = __ldcg(reinterpret_cast<const uint4*>(keys) + at);
  if (4 * at + 1 >= end) v.y = 0;
  if (4 * at + 2 >= end) v.z = 0;
  if (4 * at + 3 >= end) v.w = 0;
  return v;
}

struct Choice {
  u32 digits[DIGITS];  // how many keys have a digit
  u32 sums[2][32];
  u32 least, need;  // all keys above `least` are chosen, and the first `need` of those that equal it
  bool is_found;
};

// Adds the keys that agree with `prefix` in the bits of `mask` to the counts of their digits.
__device__ __forceinline__ void count_digits(Choice& c, const u32* keys, int end, u32 prefix, u32 mask, int shift, int bits) {
  constexpr int AHEAD = 4;
  for (int start = threadIdx.x; 4 * start < end; start += AHEAD * CHOOSERS) {
    uint4 v[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) v[a] = keys_at(keys, start + a * CHOOSERS, end);
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int at = 4 * (start + a * CHOOSERS);
      const u32 four[4] = {v[a].x, v[a].y, v[a].z, v[a].w};
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (at + i < end && (four[i] & mask) == prefix) atomicAdd(&c.digits[four[i] >> shift & ((1u << bits) - 1)], 1u);
    }
  }
}

// Finds `least` and `need` for the `best` largest of more than `best` keys, a digit at a time.
__device__ void find_least(Choice& c, const u32* keys, int end, u32 best) {
  u32 prefix = 0, mask = 0, need = best;
  for (int shift = 21; shift >= 0; shift = shift ? max(shift - 11, 0) : -1) {
    const int bits = shift ? 11 : 10;
    for (int i = threadIdx.x; i < DIGITS; i += CHOOSERS) c.digits[i] = 0;
    __syncthreads();
    count_digits(c, keys, end, prefix, mask, shift, bits);
    __syncthreads();
    const int high = DIGITS - 1 - 2 * threadIdx.x;  // this thread's digits are high and high - 1
    const u32 of_high = c.digits[high], of_low = c.digits[high - 1];
    u32 all;
    const u32 before = sum_before(of_high + of_low, c.sums[0], all);
    if (before < need && need <= before + of_high + of_low) {  // one thread
      const bool is_high = need <= before + of_high;
      c.least = prefix | (u32)(is_high ? high : high - 1) << shift;
      c.need = need - before - (is_high ? 0 : of_high);
      c.is_found = c.need == (is_high ? of_high : of_low);  // every key of the digit is chosen
    }
    __syncthreads();
    prefix = c.least, need = c.need;
    mask |= ((1u << bits) - 1) << shift;
    if (c.is_found) break;
  }
}

// Calls keep(i, p) for the i-th chosen pool p, in ascending order.
template <typename Keep>
__device__ __forceinline__ void each_chosen(Choice& c, const u32* keys, int end, u32 best, Keep keep) {
  const u32 least = c.least, need = c.need;
  u32 above = 0, equal = 0;  // of the keys of former turns
  uint4 next = keys_at(keys, threadIdx.x, end);
  for (int turn = 0; above + min(equal, need) < best && 4 * turn * CHOOSERS < end; turn++) {
    const int at = turn * CHOOSERS + threadIdx.x;
    const uint4 v = next;
    next = keys_at(keys, at + CHOOSERS, end);
    const u32 four[4] = {v.x, v.y, v.z, v.w};
    u32 counts = 0, all;  // above in the low half, equal in the high one
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (4 * at + i < end) counts += (four[i] > least) + (u32)(four[i] == least) * 65536u;
    const u32 before = sum_before(counts, c.sums[turn & 1], all);
    u32 own_above = above + (before & 0xffffu), own_equal = equal + (before >> 16);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (4 * at + i >= end) break;
      const bool is_above = four[i] > least, is_equal = four[i] == least;
      if (is_above || (is_equal && own_equal < need)) keep(own_above + min(own_equal, need), 4 * at + i);
      own_above += is_above, own_equal += is_equal;
    }
    above += all & 0xffffu, equal += all >> 16;
  }
}

// One block for each row. keys as `score` left them.
extern "C" __global__ void __launch_bounds__(CHOOSERS, 1)
    choose(const u32* keys, const int* positions, const int* counts, const int* table, int* chosen, int* num,
           int num_sequences, int num_tokens, int first, int num_rows, int num_pages, int stride, int pool, int best) {
  __shared__ Choice c;
  const Rows rows{positions, counts, table, num_sequences, num_tokens, first, num_rows, num_pages, stride, pool, best};
  const int b = blockIdx.x / num_rows, row = b * num_tokens + first + blockIdx.x % num_rows;
  const int width = best * pool + pool - 1, in_page = PAGE / pool;
  const int* pages = rows.pages(b);
  int* own = chosen + (size_t)row * width;
  take_turn();
  const int end = rows.of(b).tokens(first + blockIdx.x % num_rows), complete = end / pool, kept = min(complete, best) * pool;
  if (complete > best) {
    const u32* at = keys + (size_t)blockIdx.x * stride;
    find_least(c, at, complete, best);
    each_chosen(c, at, complete, best, [&](u32 i, int p) {
      const int place = __ldcg(pages + p / in_page) * PAGE + p % in_page * pool;
      for (int j = 0; j < pool; j++) own[i * pool + j] = place + j;
    });
  }
  for (int i = (complete > best ? kept : 0) + threadIdx.x; i < width; i += CHOOSERS) {
    const int token = i < kept ? i : complete * pool + i - kept;
    own[i] = token < end ? __ldcg(pages + token / PAGE) * PAGE + token % PAGE : -1;
  }
  if (threadIdx.x == 0) num[row] = kept + end - complete * pool;
}
