// Windows and values of prepared EXL3 tiles, in registers (formats/trellis.py, ops/prepared.py).
//
// A warp owns eight tiles of 16 x 16 that lie side by side along the outputs. Of each tile, lane l
// owns positions 8 l .. 8 l + 7: inputs 2 (l % 4) + {0, 1, 8, 9}, outputs l / 4 + {0, 8}. A lane's
// own bits of the eight tiles follow one another in TWO_K words, first bit highest; the bits before
// them are the own bits of lane l - 1 (below 2 bits also of l - 2), fetched by shuffles.
#pragma once
#include <cuda_fp16.h>

typedef unsigned int u32;
constexpr u32 ALL = 0xffffffffu;
enum Codebook { THREE_INST = 0, MCG = 1, MUL1 = 2 };

template <int TWO_K>
struct Rate {
  static constexpr int own = 4 * TWO_K;  // bits of a lane in one tile
  static constexpr int even = TWO_K / 2, odd = TWO_K - even;
  // Bits of a lane's own that come after the window of its position j.
  __device__ static constexpr int after(int j) {
    return own - (j / 2 * TWO_K + even + j % 2 * odd);
  }
};

// The bits that windows of one tile are cut from, 96 at most: a lane's own, the history before them.
struct Bits {
  u32 low, high, first;
};

// History and own bits of tile `i`; all lanes of a warp together. words: of this lane, from tile 0 on.
template <int TWO_K, int N>
__device__ __forceinline__ Bits bits_of_tile(const u32 (&words)[N], int i, int lane) {
  constexpr int own = Rate<TWO_K>::own;
  const int before = (lane + 31) & 31;
  const int at = i * own, word = at / 32, offset = at % 32;
  if constexpr (own == 16) {  // two tiles share a word, and its shuffle
    const u32 mine = words[word], theirs = __shfl_sync(ALL, mine, before);
    return {__byte_perm(mine, theirs, offset ? 0x5410 : 0x7632), 0u, 0u};
  } else {
    // Own bits from the top of a word down.
    const u32 top = offset == 0           ? words[word]
                    : offset + own <= 32  ? words[word] << offset
                    : word + 1 < N        ? __funnelshift_l(words[word + 1], words[word], offset)
                                          : 0u;
    if constexpr (own == 32) {
      return {top, __shfl_sync(ALL, top, before), 0u};
    } else if constexpr (own < 32) {
      u32 history = __shfl_sync(ALL, top, before) >> (32 - own);
      if constexpr (own < 16)
        history |= __shfl_sync(ALL, top, (lane + 30) & 31) >> (32 - own) << own;
      return {__funnelshift_r(top, history, 32 - own), own + 16 > 32 ? history >> (32 - own) : 0u, 0u};
    } else {  // the last 32 own bits, and the first ones behind the history
      const int last = at + own - 32;
      const u32 low = last % 32 == 0
                          ? words[last / 32]
                          : __funnelshift_l(words[last / 32 + 1], words[last / 32], last % 32);
      const u32 history = __shfl_sync(ALL, low, before);
      if constexpr (own == 64)
        return {low, top, history};
      else
        return {low, __funnelshift_l(top, history, own - 32), history >> (64 - own)};
    }
  }
}

// The 16 bits of position j.
template <int TWO_K>
__device__ __forceinline__ u32 window(Bits b, int j) {
  const int after = Rate<TWO_K>::after(j), shift = after % 8, byte = after / 8;
  if (after > 48) return __funnelshift_r(b.high, b.first, after - 32) & 0xffffu;
  if (byte >= 4)
    return __byte_perm(shift ? b.high >> shift : b.high, 0, byte == 4 ? 0x4410 : byte == 5 ? 0x4421 : 0x4432);
  if (byte == 3) return __funnelshift_r(b.low, b.high, after) & 0xffffu;
  const u32 word = shift ? __funnelshift_r(b.low, b.high, shift) : b.low;
  return byte == 0 ? word & 0xffffu : __byte_perm(word, 0, byte == 1 ? 0x4421 : 0x4432);
}

// Two values as fp16, the first in the low half.
template <int BOOK>
__device__ __forceinline__ u32 values(u32 first, u32 second) {
  __half2 out;
  if constexpr (BOOK == MUL1) {
    const u32 a = __dp4a(first * 0x83DCD12Du, 0x01010101u, 0x6400u);
    const u32 b = __dp4a(second * 0x83DCD12Du, 0x01010101u, 0x6400u);
    const u32 sums = __byte_perm(a, b, 0x5410);
    out = __hfma2(*reinterpret_cast<const __half2*>(&sums), __half2half2(__ushort_as_half(0x1eee)),
                  __half2half2(__ushort_as_half(0xc931)));
  } else {
    const u32 scale = BOOK == MCG ? 0xCBAC1FEDu : 89226354u, offset = BOOK == MCG ? 0u : 64248484u;
    const u32 a = ((first * scale + offset) & 0x8FFF8FFFu) ^ 0x3B603B60u;
    const u32 b = ((second * scale + offset) & 0x8FFF8FFFu) ^ 0x3B603B60u;
    const u32 low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
    out = __hadd2(*reinterpret_cast<const __half2*>(&low), *reinterpret_cast<const __half2*>(&high));
  }
  return *reinterpret_cast<u32*>(&out);
}

// A lane's part of the 16 x 16 tile as operand A (outputs x inputs) of m16n8k16.
template <int TWO_K, int BOOK>
__device__ __forceinline__ void operand(Bits b, u32 (&a)[4]) {
#pragma unroll
  for (int pair = 0; pair < 4; pair++)  // slots 0 1, 2 3, 4 5, 6 7 are registers 0, 2, 1, 3
    a[(pair & 1) * 2 + pair / 2] =
        values<BOOK>(window<TWO_K>(b, 2 * pair), window<TWO_K>(b, 2 * pair + 1));
}
