// y = x @ w.T + bias over weights in their memory layout, [outputs, k] row by row.
//
// One to six rows of x meet four or eight rows of w at a time. Few rows: the weights pass once
// through the caches and memory is the limit. Many: a block of weights stays in the L2 cache
// while all rows pass.
#include <algorithm>

#include "api.h"
#include "linear_amx.h"
#include "pool.h"
#include "vec.h"

namespace trimaran {
namespace {

constexpr int kMaxRows = kMaxSums / 4;
constexpr long kFewRows = 32;
// With few multiplications a row, hardware prefetching is enough.
constexpr long kRowsAhead = 8;

template <class T, class Out>
struct Linear {
  const T* x;
  long x_stride;
  const T* w;
  const T* bias;
  Out* y;
  long y_stride;
  long rows, k, outputs;

  INLINE void put4(long row, long n, __m128 sums) const {
    if (bias) {
      __m128 b = _mm512_castps512_ps128(load(bias + n, mask_of(4)));
      sums = _mm_add_ps(sums, b);
    }
    store4(y + row * y_stride + n, sums);
  }

  template <int R, int Q>
  INLINE void tile(long row, long n) const {
    __m128 sums[R][Q];
    dot_tile<T, R, Q>(x + row * x_stride, x_stride, w + n * k, k, k, sums,
                      R > 2 && row == 0 ? kRowsAhead * k : 0);
    for (int r = 0; r < R; ++r)
      for (int q = 0; q < Q; ++q) put4(row + r, n + 4 * q, sums[r][q]);
  }

  // Outputs [first, end) for R rows.
  template <int R>
  void strip(long row, long first, long end) const {
    long n = first;
    if (R * 8 <= std::min(kMaxSums, 16))
      for (; n + 8 <= end; n += 8) tile<R, 2>(row, n);
    for (; n + 4 <= end; n += 4) tile<R, 1>(row, n);
    for (; n < end; ++n)
      for (int r = 0; r < R; ++r) {
        float sum = dot(x + (row + r) * x_stride, w + n * k, k);
        if (bias) sum += _mm512_cvtss_f32(load(bias + n, mask_of(1)));
        store(y + (row + r) * y_stride + n, _mm512_set1_ps(sum), mask_of(1));
      }
  }

  void rows_of(long row, long count, long first, long end) const {
    switch (count) {
      case 1: return strip<1>(row, first, end);
      case 2: return strip<2>(row, first, end);
      case 3: return strip<3>(row, first, end);
      case 4: return strip<4>(row, first, end);
      case 5: return strip<5>(row, first, end);
      default: return strip<6>(row, first, end);
    }
  }

  void block(long first, long end) const {
    long passes = (rows + kMaxRows - 1) / kMaxRows;
    // A few rows fit beside a few weights in the L1 cache.
    long width = rows <= kFewRows ? 8 : end - first;
    for (long n = first; n < end; n += width)
      for (long pass = 0; pass < passes; ++pass) {
        long row = rows * pass / passes;
        rows_of(row, rows * (pass + 1) / passes - row, n, std::min(n + width, end));
      }
  }

  // Outputs from `start` on.
  void run(long start) const {
    Pool& pool = Pool::get();
    // Work items of about 64 KiB of weights, and at least as many items as threads.
    long width = std::max(8l, 65536 / (long)(k * sizeof(T)) / 8 * 8);
    long share = ((outputs - start + pool.size() - 1) / pool.size() + 7) / 8 * 8;
    width = std::min(width, share);
    pool.each((outputs - start + width - 1) / width, [&](long item) {
      long first = start + item * width;
      block(first, std::min(first + width, outputs));
    });
  }
};

template <class T>
void run(const LinearArgs& a, long start = 0) {
  const T* x = (const T*)a.x;
  const T* w = (const T*)a.weight;
  const T* bias = (const T*)a.bias;
  if (a.float_output)
    Linear<T, float>{x, a.x_stride, w, bias, (float*)a.y, a.outputs, a.rows, a.k, a.outputs}
        .run(start);
  else
    Linear<T, T>{x, a.x_stride, w, bias, (T*)a.y, a.outputs, a.rows, a.k, a.outputs}
        .run(start);
}

}  // namespace
}  // namespace trimaran

extern "C" void trimaran_linear(const LinearArgs* args) {
  using namespace trimaran;
  switch (args->dtype) {
    case kFloat32: return run<float>(*args);
    case kFloat16: return run<f16>(*args);
    default: break;
  }
  if (!amx_fits(*args)) return run<bf16>(*args);
  long done = amx_linear(*args);
  if (done < args->outputs) run<bf16>(*args, done);
}

extern "C" long trimaran_has_amx() { return trimaran::amx_is_usable(); }
