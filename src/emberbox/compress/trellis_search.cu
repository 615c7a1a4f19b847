// Trellis search of EXL3 tiles: the same paths and costs as trellis_search_numpy, bit for bit.
//
// A step evaluates all 65,536 windows of a tile: new cost[node] = min over candidates c of
// fma(v - t, v - t, old cost[predecessor]), fp16 pairs throughout. A window has its candidate in
// its top NEXT bits (NEXT: own bits of the next position) and its own bits at the bottom; its
// predecessor is window >> OWN, its node what is left without the candidate. Costs of all nodes
// lie in shared memory. A step is in trellis_books.cuh; here are both passes and the walks back.
//
// Built per rate and architecture, with -D:
//   D_EVEN, D_ODD                own bits of even and odd positions
//   TILES                        tiles of a block, in lock-step: they share values and barriers
//   NUM_BUFFERS                  of costs: 2; 1 where shared memory holds one: one barrier more
//   VALUES_IN_SHARED             1; 0 where they do not fit: read through the first-level cache
//   SHARED_BYTES, SCRATCH_BYTES  what the host allocates for a block, checked below

#include <cuda_fp16.h>

constexpr int POSITIONS = 256;
constexpr int FIRST_START = POSITIONS / 2;
constexpr int WINDOW_BITS = 16;
constexpr int NUM_WINDOWS = 1 << WINDOW_BITS;
constexpr int NUM_THREADS = 1024;
constexpr int NUM_WARPS = NUM_THREADS / 32;
constexpr int THREAD_BITS = 10;
constexpr int MAX_OWN = D_EVEN > D_ODD ? D_EVEN : D_ODD;
constexpr int MIN_OWN = D_EVEN < D_ODD ? D_EVEN : D_ODD;
constexpr int MAX_NODES = 1 << (WINDOW_BITS - MIN_OWN);
constexpr bool IN_REGISTERS = MAX_OWN <= 3;
constexpr unsigned INFINITY_PAIR = 0x7C007C00u;

// Bytes of history per step: what every step of a pass records, one word a thread in registers'
// form, one byte a node otherwise. HISTORY_BYTES x 256 per block is the scratch memory.
constexpr int HISTORY_BYTES =
    IN_REGISTERS ? 4 * NUM_THREADS : (MAX_NODES > 4096 ? MAX_NODES : 4096);
constexpr int STAGED_BYTES = 65536;
constexpr int STAGED_TILE_BYTES = STAGED_BYTES / TILES;
constexpr int STAGED_STEPS = STAGED_TILE_BYTES / HISTORY_BYTES;
constexpr int TILE_SCRATCH_BYTES = HISTORY_BYTES * POSITIONS;

struct Shared {
    __half* costs[2];        // [TILES, MAX_NODES] before and after a step
    unsigned char* staged;   // [TILES, STAGED_TILE_BYTES] history on the way back
    __half2* targets;        // [TILES, 256] pairs of equal halves
    unsigned* reduced;       // [NUM_WARPS]
    int* node;               // [TILES] where the walk back stands

    __device__ inline __half* cost(int buffer, int tile) const {
        return costs[buffer] + tile * MAX_NODES;
    }
};

#include "trellis_books.cuh"

template <int OWN, int NEXT, bool RECORD, class Book>
__device__ inline void step_all(const Book& book, const Shared& shared, unsigned char* history,
                                int position, int before) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
        book.template step<OWN, NEXT, RECORD>(
            shared.cost(before, tile), shared.cost(before ^ 1, tile),
            shared.targets[tile * POSITIONS + position],
            history + tile * TILE_SCRATCH_BYTES + position * HISTORY_BYTES);
    __syncthreads();
}

// An even number of steps from `position` (even) on, so costs end in the buffer they began in.
template <bool RECORD, class Book>
__device__ inline void forward(const Book& book, const Shared& shared, unsigned char* history,
                               int position, int count) {
    for (const int end = position + count; position < end; position += 2) {
        step_all<D_EVEN, D_ODD, RECORD>(book, shared, history, position, 0);
        step_all<D_ODD, D_EVEN, RECORD>(book, shared, history, position + 1, 1);
    }
}

// The walk of one tile through its staged history; `windows`: of the first staged position.
template <class Book>
__device__ inline int walk_back(const unsigned char* staged, int node, int* windows) {
    for (int step = STAGED_STEPS - 2; step >= 0; step -= 2) {
        const unsigned char* here = staged + step * HISTORY_BYTES;
        const int odd = (Book::template candidate<D_EVEN>(here + HISTORY_BYTES, node)
                         << (WINDOW_BITS - D_EVEN)) | node;
        node = odd >> D_ODD;
        const int even =
            (Book::template candidate<D_ODD>(here, node) << (WINDOW_BITS - D_ODD)) | node;
        node = even >> D_EVEN;
        if (windows) *reinterpret_cast<int2*>(windows + step) = make_int2(even, odd);
    }
    return node;
}

// From the nodes in shared.node after position `last` (odd) back to before position 0. Where
// `windows` is given, they are written down by position. One warp walks per tile.
template <class Book>
__device__ inline void backward(const Shared& shared, const unsigned char* history, int last,
                                int* const* windows) {
    constexpr int PIECES = STAGED_TILE_BYTES / 16;
    for (int end = last + 1; end > 0; end -= STAGED_STEPS) {
        const int first = end - STAGED_STEPS;
        for (int i = threadIdx.x; i < TILES * PIECES; i += NUM_THREADS)
            reinterpret_cast<uint4*>(shared.staged)[i] = reinterpret_cast<const uint4*>(
                history + (i / PIECES) * TILE_SCRATCH_BYTES + first * HISTORY_BYTES)[i % PIECES];
        __syncthreads();
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            if (threadIdx.x == 32 * tile)
                shared.node[tile] =
                    walk_back<Book>(shared.staged + tile * STAGED_TILE_BYTES, shared.node[tile],
                                    windows ? windows[tile] + first : nullptr);
        __syncthreads();
    }
}

__device__ inline void fill_costs(const Shared& shared, unsigned pair) {
    unsigned* cost = reinterpret_cast<unsigned*>(shared.costs[0]);
    for (int i = threadIdx.x; i < TILES * MAX_NODES / 2; i += NUM_THREADS) cost[i] = pair;
    __syncthreads();
}

// The node of lowest cost before an even position, of equal ones the smallest, to shared.node.
__device__ inline void find_free_end(const Shared& shared, int tile) {
    unsigned lowest = 0xFFFFFFFFu;
    const unsigned short* cost = reinterpret_cast<const unsigned short*>(shared.cost(0, tile));
    for (int i = threadIdx.x; i < 1 << (WINDOW_BITS - D_EVEN); i += NUM_THREADS)
        lowest = min(lowest, static_cast<unsigned>(cost[i]) << 16 | i);
    lowest = __reduce_min_sync(0xFFFFFFFFu, lowest);
    if (threadIdx.x % 32 == 0) shared.reduced[threadIdx.x / 32] = lowest;
    __syncthreads();
    if (threadIdx.x < NUM_WARPS) {
        lowest = __reduce_min_sync(0xFFFFFFFFu, shared.reduced[threadIdx.x]);
        if (threadIdx.x == 0) shared.node[tile] = lowest & 0xFFFF;
    }
    __syncthreads();
}

template <class Book>
__device__ inline void search_tiles(const Book& book, const Shared& shared, unsigned char* history,
                                    int* const* windows, __half* const* cost) {
    fill_costs(shared, 0);
    // Half of the first pass is never walked back: no history.
    forward<false>(book, shared, history, FIRST_START, POSITIONS - FIRST_START);
    forward<true>(book, shared, history, 0, FIRST_START);
    for (int tile = 0; tile < TILES; ++tile) find_free_end(shared, tile);
    backward<Book>(shared, history, FIRST_START - 1, nullptr);

    fill_costs(shared, INFINITY_PAIR);
    if (threadIdx.x < TILES)
        shared.cost(0, threadIdx.x)[shared.node[threadIdx.x]] = __ushort_as_half(0);
    __syncthreads();
    forward<true>(book, shared, history, 0, POSITIONS);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
        if (threadIdx.x == 0) *cost[tile] = shared.cost(0, tile)[shared.node[tile]];
    __syncthreads();  // history may be staged over the costs
    backward<Book>(shared, history, POSITIONS - 1, windows);
}

// Dynamic shared memory of a block; the host passes what it will ask for.
constexpr int COST_BYTES = TILES * 2 * MAX_NODES;
constexpr int COSTS_BYTES = NUM_BUFFERS * COST_BYTES;
constexpr int VALUE_BYTES = IN_REGISTERS || !VALUES_IN_SHARED ? 0 : 2 * NUM_WINDOWS;
constexpr int SMALL_BYTES = TILES * 4 * POSITIONS + 4 * NUM_WARPS + 16;
// In the first form history is staged over both cost buffers, which nobody needs on the way back.
constexpr int LARGE_BYTES =
    IN_REGISTERS ? (COSTS_BYTES > STAGED_BYTES ? COSTS_BYTES : STAGED_BYTES)
                 : VALUE_BYTES + COSTS_BYTES + STAGED_BYTES;
static_assert(SHARED_BYTES == LARGE_BYTES + SMALL_BYTES, "the host reckons memory otherwise");
static_assert(SCRATCH_BYTES == TILES * TILE_SCRATCH_BYTES, "the host reckons scratch otherwise");

// targets [num_tiles, 256] by position, values [65536] -> windows [num_tiles, 256], cost
// [num_tiles]. history: gridDim.x times SCRATCH_BYTES.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
trellis_search(const __half* __restrict__ targets, const __half* __restrict__ values,
               int* __restrict__ windows, __half* __restrict__ cost, unsigned char* history,
               int num_tiles) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared shared;
    unsigned char* at = memory + VALUE_BYTES;
    shared.costs[0] = reinterpret_cast<__half*>(at);
    shared.costs[1] = reinterpret_cast<__half*>(at + COSTS_BYTES - COST_BYTES);
    shared.staged = IN_REGISTERS ? at : at + COSTS_BYTES;
    at = memory + LARGE_BYTES;
    shared.targets = reinterpret_cast<__half2*>(at);
    shared.reduced = reinterpret_cast<unsigned*>(at + TILES * 4 * POSITIONS);
    shared.node = reinterpret_cast<int*>(at + TILES * 4 * POSITIONS + 4 * NUM_WARPS);

    const typename BookOf<IN_REGISTERS>::Type book(values, memory);
    unsigned char* own_history = history + static_cast<long long>(blockIdx.x) * SCRATCH_BYTES;
    for (long long first = static_cast<long long>(blockIdx.x) * TILES; first < num_tiles;
         first += static_cast<long long>(gridDim.x) * TILES) {
        int* windows_of[TILES];
        __half* cost_of[TILES];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            // Behind the last tile it is searched once more, to the same result.
            const long long tile = first + i < num_tiles ? first + i : num_tiles - 1;
            windows_of[i] = windows + tile * POSITIONS;
            cost_of[i] = cost + tile;
            if (threadIdx.x < POSITIONS)
                shared.targets[i * POSITIONS + threadIdx.x] =
                    __half2half2(targets[tile * POSITIONS + threadIdx.x]);
        }
        search_tiles(book, shared, own_history, windows_of, cost_of);
    }
}
