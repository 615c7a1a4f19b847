// y = H (rotated Q) svh for up to four matrices of one kind, side by side, in one launch; and the
// same for a gate and an up projection with the activation behind them.
#include "experts.cuh"
#include "gemv_units.cuh"

// A matrix as arguments, which are there at once where a table would have to be read first. begin:
// its first output group in this launch; which: its rows in `rotated`; column: its first one in y.
#define MATRIX(i) \
  const u32 *__restrict__ words##i, const __half *__restrict__ svh##i, int begin##i, int which##i, int column##i

struct Found {
  const u32* words;
  const __half* svh;
  int begin, which, column;
};

// rotated [n, T, I], of which `rows` rows from the first one that is passed on; y [rows, N].
// partial and counters: see multiply_units.
extern "C" __global__ __launch_bounds__(THREADS, 2) void multiply_side_by_side(
    MATRIX(0), MATRIX(1), MATRIX(2), MATRIX(3), const __half* __restrict__ rotated, void* __restrict__ y,
    float* partial, int* counters, int rows, int T, int I, int groups, int N) {
  const int lane = threadIdx.x & 31;
  auto matrix_of = [&](int out) {
    const Found low = out < begin1 ? Found{words0, svh0, begin0, which0, column0}
                                   : Found{words1, svh1, begin1, which1, column1};
    const Found high = out < begin3 ? Found{words2, svh2, begin2, which2, column2}
                                    : Found{words3, svh3, begin3, which3, column3};
    return out < begin2 ? low : high;
  };
  auto outputs_of = [&](int out) {
    const Found m = matrix_of(out);
    return Outputs{m.words + (size_t)(out - m.begin) * (I / 16) * (32 * RATE),
                   rotated + (size_t)m.which * T * I};
  };
  auto write = [&](int out, int row, float4 sum) {
    asm volatile("" : "+r"(out));  // found again rather than kept in registers meanwhile
    const Found m = matrix_of(out);
    const int start = (out - m.begin) * GROUP;
    void* at = reinterpret_cast<Activation<X_TYPE>::type*>(y) + (size_t)row * N;
    write_four<X_TYPE>(at, m.column + start + 4 * lane, N, times(sum, scales(m.svh + start, lane)));
  };
  multiply_units<RATE, CODEBOOK, ROW_TILES>(outputs_of, write, partial, counters, rows, I, groups);
}
