// The activation of a gate and an up projection, rotated for the projection down, in one launch.
#include "experts.cuh"
#include "gemv_units.cuh"

// rotated [2, T, I], of which `rows` rows from the first one that is passed on -> out [rows, W],
// rotated; W = 128 groups. Outputs of both matrices take turns, so that the warps that have the same
// ones end at about the same time: the later one applies the activation.
// pairs [2, rows, W]; partial: see multiply_units; counters [3 groups, rows], zero.
extern "C" __global__ __launch_bounds__(THREADS, 2) void multiply_gate_up(
    const u32* __restrict__ gate_words, const __half* __restrict__ gate_svh, const u32* __restrict__ up_words,
    const __half* __restrict__ up_svh, const __half* __restrict__ suh, const __half* __restrict__ rotated,
    __half* __restrict__ out, float* pairs, float* partial, int* counters, int rows, int T, int I, int groups,
    float limit) {
  const int lane = threadIdx.x & 31, W = groups * GROUP;
  auto outputs_of = [&](int place) {
    return Outputs{(place & 1 ? up_words : gate_words) + (size_t)(place / 2) * (I / 16) * (32 * RATE),
                   rotated + (size_t)(place & 1) * T * I};
  };
  auto write = [&](int place, int row, float4 sum) {
    asm volatile("" : "+r"(place));  // worked out again rather than kept in registers meanwhile
    const int which = place & 1, group = place / 2, start = group * GROUP;
    const float4 mine = times(sum, scales((which ? up_svh : gate_svh) + start, lane));
    auto at = [&](int w) { return pairs + ((size_t)w * rows + row) * W + start; };
    reinterpret_cast<float4*>(at(which))[lane] = mine;
    if (!is_last(counters + (2 * groups + group) * rows + row, 2, lane)) return;
    const float4 other = load_written(at(1 - which), lane);
    const float4 g = which ? other : mine, u = which ? mine : other;
    const float4 v = make_float4(activated(g.x, u.x, limit), activated(g.y, u.y, limit),
                                 activated(g.z, u.z, limit), activated(g.w, u.w, limit));
    store_swizzled(out + (size_t)row * W + start, hadamard(times(v, scales(suh + start, lane)), lane), lane);
  };
  multiply_units<RATE, CODEBOOK, ROW_TILES>(outputs_of, write, partial, counters, rows, I, 2 * groups);
}
