// y = silu(min(gate, limit)) * clamp(up, -limit, limit), rotated for the product that reads it.
#include "experts.cuh"
#include "gemv.cuh"

// gate_up [T, 2 I] -> rotated [T, I], swizzled fp16; or, without suh, y [T, I] as gate_up is.
// One warp for each 128 channels of a row.
extern "C" __global__ __launch_bounds__(THREADS) void activate(const void* __restrict__ gate_up,
                                                               const __half* __restrict__ suh,
                                                               __half* __restrict__ rotated,
                                                               void* __restrict__ y, int T, int I,
                                                               float limit) {
  typedef Activation<X_TYPE> A;
  const int lane = threadIdx.x & 31, groups = (I + GROUP - 1) / GROUP;
  const int task = blockIdx.x * WARPS + (threadIdx.x >> 5);
  const int row = task / groups, start = task % groups * GROUP;
  float4 scale = make_float4(0, 0, 0, 0);
  if (suh) scale = scales(suh + start, lane);
  take_turn();
  if (row >= T) return;
  const A::type* gate = reinterpret_cast<const A::type*>(gate_up) + (size_t)row * 2 * I;
  const float4 g = read_four<X_TYPE>(gate, start + 4 * lane, I);
  const float4 u = read_four<X_TYPE>(gate + I, start + 4 * lane, I);
  auto rounded = [&](float a, float b) { return A::read(A::write(activated(a, b, limit))); };
  const float4 v = make_float4(rounded(g.x, u.x), rounded(g.y, u.y), rounded(g.z, u.z), rounded(g.w, u.w));
  if (suh)
    store_swizzled(rotated + (size_t)row * I + start, hadamard(times(v, scale), lane), lane);
  else
    write_four<X_TYPE>(reinterpret_cast<A::type*>(y) + (size_t)row * I, start + 4 * lane, I, v);
}
