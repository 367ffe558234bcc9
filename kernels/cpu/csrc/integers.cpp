// y = x @ w.T + bias over weights of 4 or 8 bits, integers or FP4 numbers, with a scale for each
// output and segment of k.
//
// Products are added up as integers inside a segment, then as floats, in one order whatever the
// rows and the instructions. `integers.h` turns x into integers.
//
// Sixteen outputs are a block. Memory holds a block's pairs (8 bits) or fours (4 bits) of k one
// after another: 32 bytes with the integers of each output side by side.
#include <algorithm>

#include "api.h"
#include "integers.h"
#include "integers_amx.h"
#include "pool.h"
#include "vec.h"

namespace trimaran {
namespace {

constexpr int kMaxRows = HAS_AVX512 ? 8 : 4;
constexpr __mmask16 kAll = 0xffff;

#if HAS_AVX512
using Words = __m512i;
INLINE Words zero_words() { return _mm512_setzero_si512(); }
INLINE Words signed_words(const uint8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
}
INLINE Words unsigned_words(const uint8_t* p) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
}
INLINE Words low_halves(Words w) { return _mm512_and_si512(w, _mm512_set1_epi16(15)); }
INLINE Words high_halves(Words w) { return _mm512_srli_epi16(w, 4); }
INLINE __m256i fp4_halves(__m256i codes) {
  const __m256i table = _mm256_setr_epi8(FP4_HALVES, FP4_HALVES);
  return _mm256_shuffle_epi8(table, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
}
INLINE void fp4_words(const uint8_t* p, Words& low, Words& high) {
  __m256i both = _mm256_loadu_si256((const __m256i*)p);
  low = _mm512_cvtepi8_epi16(fp4_halves(both));
  high = _mm512_cvtepi8_epi16(fp4_halves(_mm256_srli_epi16(both, 4)));
}
INLINE Words add_products(Words sums, Words w, Words x) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(sums, w, x);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(w, x));
#endif
}
// In assembly: compilers load two pairs into a general register, and move each from there.
INLINE Words pairs_of(const int16_t* x) {
  Words pairs;
  __asm__("vpbroadcastd %1, %0" : "=v"(pairs) : "m"(*(const int16_t(*)[2])x));
  return pairs;
}
INLINE Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
INLINE __m512 to_floats(Words sums, int less) {
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(less)));
}
#else
struct Words {
  __m256i lo, hi;
};
INLINE Words zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE Words signed_words(const uint8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
INLINE Words unsigned_words(const uint8_t* p) {
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
INLINE Words low_halves(Words w) {
  const __m256i mask = _mm256_set1_epi16(15);
  return {_mm256_and_si256(w.lo, mask), _mm256_and_si256(w.hi, mask)};
}
INLINE Words high_halves(Words w) {
  return {_mm256_srli_epi16(w.lo, 4), _mm256_srli_epi16(w.hi, 4)};
}
INLINE __m256i fp4_halves(__m128i codes) {
  const __m128i table = _mm_setr_epi8(FP4_HALVES);
  return _mm256_cvtepi8_epi16(
      _mm_shuffle_epi8(table, _mm_and_si128(codes, _mm_set1_epi8(15))));
}
INLINE void fp4_words(const uint8_t* p, Words& low, Words& high) {
  __m128i first = _mm_loadu_si128((const __m128i*)p);
  __m128i second = _mm_loadu_si128((const __m128i*)(p + 16));
  low = {fp4_halves(first), fp4_halves(second)};
  high = {fp4_halves(_mm_srli_epi16(first, 4)), fp4_halves(_mm_srli_epi16(second, 4))};
}
INLINE Words add_words(Words a, Words b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
INLINE Words add_products(Words sums, Words w, Words x) {
  return add_words(sums, {_mm256_madd_epi16(w.lo, x.lo), _mm256_madd_epi16(w.hi, x.lo)});
}
// In assembly: compilers load two pairs into a general register, and move each from there.
INLINE Words pairs_of(const int16_t* x) {
  __m256i pairs;
  __asm__("vpbroadcastd %1, %0" : "=x"(pairs) : "m"(*(const int16_t(*)[2])x));
  return {pairs, pairs};
}
INLINE __m512 to_floats(Words sums, int less) {
  const __m256i by = _mm256_set1_epi32(less);
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(sums.lo, by)),
          _mm256_cvtepi32_ps(_mm256_sub_epi32(sums.hi, by))};
}
#endif

// Adds up one segment's products of R rows and N blocks, whose bytes lie `stride` apart. Bytes are
// prefetched `ahead` of their use; 0 disables prefetching.
template <int F, int R, int N>
INLINE void add_segment(const int16_t* x, long x_stride, const uint8_t* at, long stride,
                        long count, long ahead, Words dots[R][N]) {
  // With few sums each is two, which do not wait for each other.
  constexpr bool kHasTwo = R * N <= 4;
  Words others[kHasTwo ? R : 1][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      dots[r][n] = zero_words();
      if constexpr (kHasTwo) others[r][n] = zero_words();
    }
  for (long i = 0; i < count; i += kStep, at += kBlock * kStep * bits_of(F) / 8) {
    Words first[N], second[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      if (F == kFp4) {
        fp4_words(at + n * stride, first[n], second[n]);
      } else if (F == kFour) {
        Words both = unsigned_words(at + n * stride);
        first[n] = low_halves(both);
        second[n] = high_halves(both);
      } else {
        first[n] = signed_words(at + n * stride);
        second[n] = signed_words(at + n * stride + 32);
      }
      if (ahead) _mm_prefetch((const char*)(at + n * stride + ahead), _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Words pairs = pairs_of(x + r * x_stride + i);
      const Words next = pairs_of(x + r * x_stride + i + 2);
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        dots[r][n] = add_products(dots[r][n], first[n], pairs);
        if constexpr (kHasTwo)
          others[r][n] = add_products(others[r][n], second[n], next);
        else
          dots[r][n] = add_products(dots[r][n], second[n], next);
      }
    }
  }
  if constexpr (kHasTwo)
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) dots[r][n] = add_words(dots[r][n], others[r][n]);
}

// N blocks of sixteen outputs for R rows: floats [R, N, 16]. Apart from what writes the outputs,
// so that compilers see each tile once, not for each type of x and y.
template <int F, int R, int N>
__attribute__((noinline)) void tile(const IntegerWeights& w, const Inputs& in, long row,
                                    long block, float* outputs) {
  const long stride = kBlock * w.k * bits_of(F) / 8, of_scales = w.num_scales * kBlock;
  const uint8_t* values = (const uint8_t*)w.values + block * stride;
  const float* scales = w.scales + block * of_scales;
  const float* offsets = w.offsets ? w.offsets + block * of_scales : nullptr;
  const int16_t* x = in.values.data() + row * w.k;
  const long ahead = row == 0 ? N * stride : 0;
  __m512 sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = _mm512_setzero_ps();
  for (long s = 0; s < w.num_segments; ++s) {
    const int32_t* segment = w.segments + 3 * s;
    Words dots[R][N];
    const uint8_t* of_segment = values + segment[0] * kBlock * bits_of(F) / 8;
    add_segment<F, R, N>(x + segment[0], w.k, of_segment, stride, segment[1], ahead, dots);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      long place = (row + r) * w.num_segments + s;
      int less = F == kFour && !offsets ? 8 * in.sums[place] : 0;
      __m512 by = _mm512_set1_ps(in.scales[place]);
      __m512 sum = _mm512_set1_ps(in.scales[place] * (float)in.sums[place]);
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        long at = segment[2] * kBlock + n * of_scales;
        __m512 scale = _mm512_mul_ps(load(scales + at), by);
        sums[r][n] = _mm512_fmadd_ps(to_floats(dots[r][n], less), scale, sums[r][n]);
        if (offsets) sums[r][n] = _mm512_fmadd_ps(load(offsets + at), sum, sums[r][n]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(outputs + (r * N + n) * kBlock, sums[r][n], kAll);
}

template <int F, int N>
void tile_of(long rows, const IntegerWeights& w, const Inputs& in, long row, long block,
             float* outputs) {
  switch (rows) {
    case 1: return tile<F, 1, N>(w, in, row, block, outputs);
    case 2: return tile<F, 2, N>(w, in, row, block, outputs);
    case 3: return tile<F, 3, N>(w, in, row, block, outputs);
#if HAS_AVX512
    case 4: return tile<F, 4, N>(w, in, row, block, outputs);
    case 5: return tile<F, 5, N>(w, in, row, block, outputs);
    case 6: return tile<F, 6, N>(w, in, row, block, outputs);
    case 7: return tile<F, 7, N>(w, in, row, block, outputs);
    default: return tile<F, 8, N>(w, in, row, block, outputs);
#else
    default: return tile<F, 4, N>(w, in, row, block, outputs);
#endif
  }
}

template <class T, class Out>
struct Product {
  const IntegerArgs& a;
  const IntegerWeights& w;
  const Inputs& in;
  const IntegerTiles& tiles;
  const ByteRows* tile_rows;  // null: no tile instructions
  long copies;

  // Rows of integers from `row` on, whose pairs are one row of floats.
  void write(const float* sums, long row, long rows, long block, long num_blocks) const {
    for (long n = 0; n < num_blocks; ++n) {
      long output = (block + n) * kBlock;
      __mmask16 mask = mask_of(std::min(kBlock, w.outputs - output));
      for (long r = 0; r < rows; r += copies) {
        const float* at = sums + (r * num_blocks + n) * kBlock;
        __m512 sum = load(at);
        if (w.has_byte_inputs) sum = _mm512_mul_ps(sum, _mm512_set1_ps(in.row_scales[row + r]));
        if (copies == 2) sum = _mm512_add_ps(sum, load(at + num_blocks * kBlock));
        if (a.bias) sum = _mm512_add_ps(sum, load((const T*)a.bias + output, mask));
        store((Out*)a.y + (row + r) / copies * w.outputs + output, sum, mask);
      }
    }
  }

  template <int N>
  void blocks(long block) const {
    alignas(64) float sums[kMaxRows * N * kBlock];
    long passes = (in.rows + kMaxRows - 1) / kMaxRows;
    for (long pass = 0; pass < passes; ++pass) {
      // Even, so that a row of floats stays whole.
      long row = in.rows * pass / passes & -copies;
      long end = pass + 1 < passes ? in.rows * (pass + 1) / passes & -copies : in.rows;
      if (w.is_fp4)
        tile_of<kFp4, N>(end - row, w, in, row, block, sums);
      else if (w.bits == 4)
        tile_of<kFour, N>(end - row, w, in, row, block, sums);
      else
        tile_of<kEight, N>(end - row, w, in, row, block, sums);
      write(sums, row, end - row, block, N);
    }
  }

#if HAS_AMX_INT8
  // Blocks [first, end) by tile instructions.
  void tile_blocks(long first, long end) const {
    alignas(64) float sums[kTileRows * kTileBlocks * kBlock];
    begin_integer_tiles(tiles, in.rows);
    for (long row = 0; row < in.rows; row += kTileRows)
      for (long n = first; n < end; n += kTileBlocks) {
        long rows = std::min(kTileRows, in.rows - row);
        long num_blocks = std::min(kTileBlocks, end - n);
        integer_tiles({w, in, tiles, *tile_rows, row, rows, n, num_blocks, sums});
        write(sums, row, rows, n, num_blocks);
      }
    end_integer_tiles();
  }
#endif

  void run() const {
    Pool& pool = Pool::get();
    long count = (w.outputs + kBlock - 1) / kBlock;
    // Work items of about 64 KiB of weights, and at least as many items as threads.
    long bytes = std::max(1l, kBlock * w.k * w.bits / 8);
    long width = std::max(1l, std::min(65536 / bytes, (count + pool.size() - 1) / pool.size()));
    pool.each((count + width - 1) / width, [&](long item) {
      long n = item * width, end = std::min(n + width, count);
#if HAS_AMX_INT8
      if (tile_rows) return tile_blocks(n, end);
#endif
      // Two blocks share the loads of x; the registers of AVX2 hold one.
      if constexpr (HAS_AVX512)
        for (; n + 2 <= end; n += 2) blocks<2>(n);
      for (; n < end; ++n) blocks<1>(n);
    });
  }
};

template <class T>
void run(const IntegerArgs& a) {
  // Kept for the next call: one caller at a time.
  static Inputs in;
  static ByteRows tile_rows;
  const IntegerWeights& w = *a.weight;
  long copies = sizeof(T) == 4 && !w.has_byte_inputs ? 2 : 1;
  in.rows = a.rows * copies;
  if ((long)in.values.size() < in.rows * w.k) in.values.resize(in.rows * w.k);
  if ((long)in.floats.size() < a.rows * w.k) in.floats.resize(a.rows * w.k);
  if ((long)in.scales.size() < in.rows * w.num_segments) {
    in.scales.resize(in.rows * w.num_segments);
    in.sums.resize(in.rows * w.num_segments);
  }
  if ((long)in.row_scales.size() < in.rows) in.row_scales.resize(in.rows);
  const IntegerTiles tiles = IntegerTiles::of(w);
  const bool has_tiles = integer_tiles_fit(tiles, in.rows);
  if (has_tiles) tile_rows.resize(w, tiles, in.rows);
  Pool::get().each(a.rows, [&](long row) {
    quantize<T>(a, w, row, in);
    for (long copy = 0; has_tiles && copy < copies; ++copy)
      tile_rows.pack(w, tiles, in, row * copies + copy);
  });
  if (a.float_output)
    Product<T, float>{a, w, in, tiles, has_tiles ? &tile_rows : nullptr, copies}.run();
  else
    Product<T, T>{a, w, in, tiles, has_tiles ? &tile_rows : nullptr, copies}.run();
}

}  // namespace
}  // namespace trimaran

extern "C" long trimaran_has_integer_tiles() {
  return HAS_AMX_INT8 && trimaran::amx_is_usable();
}

extern "C" void trimaran_integer_linear(const IntegerArgs* args) {
  using namespace trimaran;
  switch (args->dtype) {
    case kFloat32: return run<float>(*args);
    case kFloat16: return run<f16>(*args);
    default: return run<bf16>(*args);
  }
}
