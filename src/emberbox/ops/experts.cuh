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

__device__ __forceinline__ float activated(float gate, float up, float limit) {
  gate = fminf(gate, limit);
  return gate / (1.f + __expf(-gate)) * fminf(fmaxf(up, -limit), limit);
}
