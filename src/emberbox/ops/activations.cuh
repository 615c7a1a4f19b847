// Activations of one of three types, four neighbouring channels at a time.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

template <int TYPE>
struct Activation;
template <>
struct Activation<FLOAT32> {
  typedef float type;
  static __device__ float read(float v) { return v; }
  static __device__ float write(float v) { return v; }
};
template <>
struct Activation<FLOAT16> {
  typedef __half type;
  static __device__ float read(__half v) { return __half2float(v); }
  static __device__ __half write(float v) { return __float2half_rn(v); }
};
template <>
struct Activation<BFLOAT16> {
  typedef __nv_bfloat16 type;
  static __device__ float read(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __nv_bfloat16 write(float v) { return __float2bfloat16_rn(v); }
};

// Channels start .. start + 3; beyond `size` they are zero.
template <int TYPE>
__device__ __forceinline__ float4 read_four(const void* row, int start, int size) {
  typedef Activation<TYPE> A;
  const typename A::type* x = reinterpret_cast<const typename A::type*>(row);
  auto at = [&](int i) { return start + i < size ? A::read(x[start + i]) : 0.f; };
  return make_float4(at(0), at(1), at(2), at(3));
}

template <int TYPE>
__device__ __forceinline__ void write_four(void* row, int start, int size, float4 v) {
  typedef Activation<TYPE> A;
  typename A::type* y = reinterpret_cast<typename A::type*>(row);
  const float f[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (start + i < size) y[start + i] = A::write(f[i]);
}
