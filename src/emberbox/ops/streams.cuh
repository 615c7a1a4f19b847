// Parallel residual streams: four channels of a token at a time, and what a sublayer's result makes
// of them. What kernels write is read past the L1 cache.
#pragma once
#include "activations.cuh"

constexpr int STREAMS = 4;

// Four numbers of a type as they lie in memory, two and two.
template <int TYPE>
struct Four {
  typedef uint2 type;
  static __device__ __forceinline__ float4 unpack(uint2 v) {
    const float2 a = pair(v.x), b = pair(v.y);
    return make_float4(a.x, a.y, b.x, b.y);
  }
  static __device__ __forceinline__ uint2 pack(float4 v) {
    return make_uint2(bits(v.x, v.y), bits(v.z, v.w));
  }

 private:
  static __device__ __forceinline__ float2 pair(unsigned bits) {
    if constexpr (TYPE == BFLOAT16) {
      return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
    } else {
      return __half22float2(*reinterpret_cast<const __half2*>(&bits));
    }
  }
  static __device__ __forceinline__ unsigned bits(float a, float b) {
    if constexpr (TYPE == BFLOAT16) {
      const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
      return *reinterpret_cast<const unsigned*>(&both);
    } else {
      const __half2 both = __floats2half2_rn(a, b);
      return *reinterpret_cast<const unsigned*>(&both);
    }
  }
};
template <>
struct Four<FLOAT32> {
  typedef float4 type;
  static __device__ __forceinline__ float4 unpack(float4 v) { return v; }
  static __device__ __forceinline__ float4 pack(float4 v) { return v; }
};

// Where numbers at .. at + 3 of an array lie; it is aligned to four of them.
template <int TYPE>
__device__ __forceinline__ typename Four<TYPE>::type* place_of(const void* array, unsigned at) {
  auto* numbers = reinterpret_cast<typename Activation<TYPE>::type*>(const_cast<void*>(array));
  return reinterpret_cast<typename Four<TYPE>::type*>(numbers + at);
}

// As they lie there: unpacking, which waits for them, may come later.
template <int TYPE>
__device__ __forceinline__ typename Four<TYPE>::type load_packed(const void* array, unsigned at) {
  return __ldcg(place_of<TYPE>(array, at));
}

template <int TYPE>
__device__ __forceinline__ float4 load_four(const void* array, unsigned at) {
  return Four<TYPE>::unpack(load_packed<TYPE>(array, at));
}

template <int TYPE>
__device__ __forceinline__ void store_four(void* array, unsigned at, float4 v) {
  *place_of<TYPE>(array, at) = Four<TYPE>::pack(v);
}

// As it is read again after it was stored.
template <int TYPE>
__device__ __forceinline__ float4 rounded(float4 v) {
  return Four<TYPE>::unpack(Four<TYPE>::pack(v));
}

// Written as it is computed: a token gives the same alone and among others.
__device__ __forceinline__ float dot(float4 a, float4 b) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

__device__ __forceinline__ void add_times(float4& sum, float factor, float4 v) {
  sum.x = fmaf(factor, v.x, sum.x), sum.y = fmaf(factor, v.y, sum.y);
  sum.z = fmaf(factor, v.z, sum.z), sum.w = fmaf(factor, v.w, sum.w);
}

// Four channels of a sublayer's result: of one tensor, or the rounded sum of two. Both are on their
// way before one is looked at.
template <int TYPE>
__device__ __forceinline__ float4 load_result(const void* y0, const void* y1, unsigned at) {
  const auto first = load_packed<TYPE>(y0, at), second = load_packed<TYPE>(y1 ? y1 : y0, at);
  float4 y = Four<TYPE>::unpack(first);
  add_times(y, y1 ? 1.f : 0.f, Four<TYPE>::unpack(second));
  return rounded<TYPE>(y);
}

// The number is computed here, before a kernel's turn, and not where it is needed.
__device__ __forceinline__ unsigned ahead(unsigned number) {
  asm volatile("" : "+r"(number));
  return number;
}

// How a token's result and old streams make one of its streams: the column of mix [S, S] that it is
// given the first of, and the entry of post.
struct Spreading {
  float of_result, of_stream[STREAMS];

  Spreading() = default;
  __device__ __forceinline__ Spreading(const float* post, const float* mix) {
    of_result = __ldcg(post);
#pragma unroll
    for (int s = 0; s < STREAMS; s++) of_stream[s] = __ldcg(mix + s * STREAMS);
  }

  template <int TYPE>
  __device__ __forceinline__ float4 apply(const typename Four<TYPE>::type (&x)[STREAMS], float4 y) const {
    float4 sum = make_float4(0, 0, 0, 0);
    add_times(sum, of_result, y);
#pragma unroll
    for (int s = 0; s < STREAMS; s++) add_times(sum, of_stream[s], Four<TYPE>::unpack(x[s]));
    return rounded<TYPE>(sum);
  }
};
