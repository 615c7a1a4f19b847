// What the kernels of routed experts share: where matrices lie, and the activation.
#pragma once
#include "activations.cuh"
#include "trellis.cuh"

constexpr int MATRICES = 3;  // gate, up, down

// Of an expert, in device memory.
struct Matrix {
  const u32* words;
  const __half *suh, *svh;
  long long kind;  // 4 TWO_K + codebook
};

// What is not a number stays so.
__device__ __forceinline__ float activated(float gate, float up, float limit) {
  const float g = gate == gate ? fminf(gate, limit) : gate;
  const float u = up == up ? fminf(fmaxf(up, -limit), limit) : up;
  return g / (1.f + __expf(-g)) * u;
}
