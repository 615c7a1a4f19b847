// A step of the trellis search, and the two ways to hold the values of the codebook, which are an
// operand and never derived:
//   RegisterBook  at most 3 own bits: a thread owns the same 64 windows at every step, their values
//                 stay in 32 registers as pairs, all candidates of a node meet in one thread;
//   SharedBook    more: values lie in shared memory, a thread walks over its nodes' candidates.
// Each records which candidate a node took (history) and reads that again.
// Part of trellis_search.cu, whose macros and constants it takes.

#pragma once

__device__ inline unsigned bits_of(__half2 x) { return *reinterpret_cast<unsigned*>(&x); }

__device__ inline __half2 pair_of(unsigned bits) { return *reinterpret_cast<__half2*>(&bits); }

__device__ inline __half2 reached(__half2 value, __half2 target, __half2 cost) {
    const __half2 difference = __hsub2(value, target);
    return __hfma2(difference, difference, cost);
}

// Of `yes` where a mask is set, of `no` elsewhere.
__device__ inline unsigned select(unsigned mask, unsigned yes, unsigned no) {
    return (mask & yes) | (~mask & no);
}

// The lowest of COUNT = 2^BITS costs and which candidate it is, as one mask per bit. Of equal
// costs the smaller candidate wins: the upper half wins only where strictly less.
template <int BITS, int STRIDE, bool RECORD>
struct Lowest {
    __half2 cost;
    unsigned masks[BITS > 0 ? BITS : 1];

    __device__ inline explicit Lowest(const __half2* costs) {
        const Lowest<BITS - 1, STRIDE, RECORD> low(costs);
        const Lowest<BITS - 1, STRIDE, RECORD> high(costs + (STRIDE << (BITS - 1)));
        cost = __hmin2(low.cost, high.cost);
        if (RECORD) {
            const unsigned is_high = __hlt2_mask(high.cost, low.cost);
#pragma unroll
            for (int bit = 0; bit < BITS - 1; ++bit)
                masks[bit] = select(is_high, high.masks[bit], low.masks[bit]);
            masks[BITS - 1] = is_high;
        }
    }
};

template <int STRIDE, bool RECORD>
struct Lowest<0, STRIDE, RECORD> {
    __half2 cost;
    unsigned masks[1];

    __device__ inline explicit Lowest(const __half2* costs) : cost(costs[0]) {}
};

// ---- values in registers ------------------------------------------------------------------------
// Window = top (TOP_BITS) | thread (10) | low (LOW_BITS): a thread owns all tops and lows.

constexpr int TOP_BITS = IN_REGISTERS ? MAX_OWN : 1;
constexpr int LOW_BITS = WINDOW_BITS - THREAD_BITS - TOP_BITS;
constexpr int TOPS = 1 << TOP_BITS;
constexpr int PAIRS = 1 << (LOW_BITS - 1);  // of neighbouring windows, per top

template <int BYTES> struct WordOf { using Type = uint4; };
template <> struct WordOf<8> { using Type = uint2; };
template <> struct WordOf<4> { using Type = unsigned; };
template <> struct WordOf<2> { using Type = __half; };

// COUNT halves from shared memory in the widest loads that their alignment allows.
template <int COUNT>
__device__ inline void load_costs(__half* to, const __half* from) {
    using Word = typename WordOf<2 * COUNT>::Type;
#pragma unroll
    for (int i = 0; i < COUNT; i += sizeof(Word) / 2)
        *reinterpret_cast<Word*>(to + i) = *reinterpret_cast<const Word*>(from + i);
}

__device__ inline void store_costs(__half* to, __half2 (&from)[PAIRS]) {
    static_assert(PAIRS % 4 == 0, "a store holds four pairs");
#pragma unroll
    for (int i = 0; i < PAIRS; i += 4)
        *reinterpret_cast<uint4*>(to + 2 * i) = make_uint4(
            bits_of(from[i]), bits_of(from[i + 1]), bits_of(from[i + 2]), bits_of(from[i + 3]));
}

struct RegisterBook {
    __half2 values[TOPS * PAIRS];  // [top][pair]

    __device__ inline RegisterBook(const __half* table, void*) {
#pragma unroll
        for (int top = 0; top < TOPS; ++top)
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair)
                values[top * PAIRS + pair] = reinterpret_cast<const __half2*>(
                    table)[(((top << THREAD_BITS) | threadIdx.x) << (LOW_BITS - 1)) | pair];
    }

    template <int OWN, int NEXT, bool RECORD>
    __device__ inline void step(const __half* before, __half* after, __half2 target,
                                unsigned char* history) const {
        constexpr int SHARED_COSTS = 1 << (LOW_BITS - OWN);  // predecessors per top
        constexpr int GROUPS = 1 << (TOP_BITS - NEXT);       // tops that are no candidates
        const __half* from = before + threadIdx.x * SHARED_COSTS;
        __half* to = after + (threadIdx.x << LOW_BITS);
        alignas(16) __half costs[TOPS][SHARED_COSTS];
#pragma unroll
        for (int top = 0; top < TOPS; ++top)
            load_costs<SHARED_COSTS>(costs[top], from + (top << (WINDOW_BITS - TOP_BITS - OWN)));
        if (NUM_BUFFERS == 1) __syncthreads();
        unsigned word = 0;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            __half2 best[PAIRS];
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                __half2 all[TOPS];
#pragma unroll
                for (int top = group; top < TOPS; top += GROUPS)
                    all[top] = reached(values[top * PAIRS + pair], target,
                                       __half2half2(costs[top][(2 * pair) >> OWN]));
                const Lowest<NEXT, GROUPS, RECORD> lowest(all + group);
                best[pair] = lowest.cost;
                if (RECORD) {
#pragma unroll
                    for (int bit = 0; bit < NEXT; ++bit)
                        word |= lowest.masks[bit] &
                                (0x10001u << ((group * PAIRS + pair) * NEXT + bit));
                }
            }
            store_costs(to + (group << (THREAD_BITS + LOW_BITS)), best);
        }
        if (RECORD) reinterpret_cast<unsigned*>(history)[threadIdx.x] = word;
    }

    // The candidate that `node` took, from the history of a step.
    template <int NEXT>
    __device__ static inline int candidate(const unsigned char* history, int node) {
        const int low = node & ((1 << LOW_BITS) - 1);
        const int thread = (node >> LOW_BITS) & (NUM_THREADS - 1);
        const int group = node >> (LOW_BITS + THREAD_BITS);
        const unsigned word = reinterpret_cast<const unsigned*>(history)[thread];
        const int pair = group * PAIRS + (low >> 1);
        return (word >> (pair * NEXT + 16 * (low & 1))) & ((1 << NEXT) - 1);
    }
};

// ---- values in shared memory --------------------------------------------------------------------

struct SharedBook {
    const __half2* values;

    __device__ inline SharedBook(const __half* table, void* room)
        : values(static_cast<const __half2*>(VALUES_IN_SHARED ? room : (const void*)table)) {
        if (!VALUES_IN_SHARED) return;
        for (int i = threadIdx.x; i < NUM_WINDOWS / 8; i += NUM_THREADS)
            static_cast<uint4*>(room)[i] = reinterpret_cast<const uint4*>(table)[i];
    }

    template <int OWN, int NEXT, bool RECORD>
    __device__ inline void step(const __half* before, __half* after, __half2 target,
                                unsigned char* history) const {
        constexpr int NODES = 1 << (WINDOW_BITS - NEXT);
        constexpr int CANDIDATES = 1 << NEXT;
        constexpr int PREDECESSORS = NODES >> OWN;  // per candidate
        constexpr int COUNT = NODES / NUM_THREADS >= 4 ? 2 : 1;  // pairs of nodes at once
        for (int first = threadIdx.x * COUNT; first < NODES / 2; first += NUM_THREADS * COUNT) {
            __half2 best[COUNT];
            unsigned taken[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                best[i] = pair_of(0x7FFF7FFFu);  // not a number: fmin takes the other
                taken[i] = 0;
            }
#pragma unroll 8
            for (int c = 0; c < CANDIDATES; ++c) {
                const __half so_far = before[c * PREDECESSORS + ((2 * first) >> OWN)];
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    const __half2 cost = reached(values[(c * NODES) / 2 + first + i], target,
                                                 __half2half2(so_far));
                    if (RECORD)
                        taken[i] = select(__hlt2_mask(cost, best[i]), c * 0x10001u, taken[i]);
                    best[i] = __hmin2(best[i], cost);
                }
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                reinterpret_cast<__half2*>(after)[first + i] = best[i];
                if (RECORD)
                    reinterpret_cast<unsigned short*>(history)[first + i] =
                        (taken[i] & 0xFF) | (taken[i] >> 8);
            }
        }
    }

    template <int NEXT>
    __device__ static inline int candidate(const unsigned char* history, int node) {
        return history[node];
    }
};

template <bool REGISTERS> struct BookOf { using Type = RegisterBook; };
template <> struct BookOf<false> { using Type = SharedBook; };
