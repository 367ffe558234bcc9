// Products of integers by tile instructions, if compiler and processor support them: sixteen rows
// of x meet two blocks of outputs.
//
// A 16-bit integer of x is two bytes, 256 * high + low, of which the high byte has the sign. Tiles
// multiply both by the weights, and the two sums of a segment become one integer of 32 bits. These
// integers are exact, and equal to those of other instructions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "amx.h"
#include "api.h"
#include "integers.h"

#if HAS_AMX && defined(__AMX_INT8__)
#define HAS_AMX_INT8 1
#else
#define HAS_AMX_INT8 0
#endif

namespace trimaran {

// Rows that share a segment's weights, and blocks that share the bytes of x.
constexpr long kTileRows = 128;
constexpr long kTileBlocks = 4;
// The longest segment; `integers.py` cuts longer ones.
constexpr long kMaxColumns = 128;

// The tiles of x: `steps` for each segment, of `step` columns each. Columns behind a segment's end
// meet weights of zero.
struct IntegerTiles {
  long step, steps, parts;

  static IntegerTiles of(const IntegerWeights& w) {
    long longest = kStep;
    for (long s = 0; s < w.num_segments; ++s)
      longest = std::max<long>(longest, w.segments[3 * s + 1]);
    long steps = (longest + 63) / 64;
    long step = ((longest + steps - 1) / steps + kStep - 1) / kStep * kStep;
    return {step, steps, w.has_byte_inputs ? 1 : 2};
  }
  long tile_bytes() const { return 16 * step; }
  // The bytes of a segment of sixteen rows of x.
  long segment_bytes() const { return steps * parts * tile_bytes(); }
  // The bytes of a block's weights of a segment.
  long weight_bytes() const { return steps * step * kBlock; }
};

// The bytes of all rows of x: for each sixteen rows, segment and step a tile of high bytes and a
// tile of low bytes, or one tile of the bytes that x consists of.
class ByteRows {
 public:
  void resize(const IntegerWeights& w, const IntegerTiles& tiles, long rows) {
    of_rows_ = w.num_segments * tiles.segment_bytes();
    long size = (rows + 15) / 16 * of_rows_ + 64;
    if ((long)bytes_.size() < size) bytes_.resize(size);
    // Rows of tiles are cache lines.
    start_ = (uint8_t*)(((uintptr_t)bytes_.data() + 63) / 64 * 64);
  }

  const uint8_t* at(const IntegerTiles& tiles, long row, long segment) const {
    return start_ + row / 16 * of_rows_ + segment * tiles.segment_bytes();
  }

  void pack(const IntegerWeights& w, const IntegerTiles& tiles, const Inputs& in, long row) {
    uint8_t* out = start_ + row / 16 * of_rows_ + row % 16 * tiles.step;
    for (long s = 0; s < w.num_segments; ++s) {
      const int32_t* segment = w.segments + 3 * s;
      const int16_t* values = in.values.data() + row * w.k + segment[0];
      for (long t = 0; t < tiles.steps; ++t, out += tiles.parts * tiles.tile_bytes()) {
        long first = t * tiles.step, count = std::min(tiles.step, segment[1] - first);
        if (tiles.parts == 1)
          copy(values + first, count, out);
        else
          split(values + first, count, out, out + tiles.tile_bytes());
      }
    }
  }

 private:
  static void copy(const int16_t* __restrict x, long count, uint8_t* __restrict out) {
    for (long i = 0; i < count; ++i) out[i] = (uint8_t)x[i];
  }
  static void split(const int16_t* __restrict x, long count, uint8_t* __restrict high,
                    uint8_t* __restrict low) {
    for (long i = 0; i < count; ++i) {
      high[i] = (uint8_t)(x[i] >> 8);
      low[i] = (uint8_t)x[i];
    }
  }

  std::vector<uint8_t> bytes_;
  uint8_t* start_ = nullptr;
  long of_rows_ = 0;
};

#if HAS_AMX_INT8

// Fewer rows, and segments of fewer columns, took less time without tiles.
constexpr long kMinTileRows = 13;
constexpr long kMinTileColumns = 64;

inline bool integer_tiles_fit(const IntegerTiles& tiles, long rows) {
  const bool is_wide = tiles.steps * tiles.step >= kMinTileColumns;
  return is_wide && rows >= kMinTileRows && amx_is_usable();
}

// Tiles 0 to 3 hold sums, 4 and 5 bytes of x, 6 and 7 weights.
inline void configure_tiles(long rows, long step) {
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  alignas(64) Config config = {1, 0, {}, {}, {}};
  for (int tile = 0; tile < 8; ++tile) {
    bool is_x = tile == 4 || tile == 5, is_weight = tile >= 6;
    config.row_bytes[tile] = (uint16_t)(is_x ? step : 64);
    config.rows[tile] = (uint8_t)(is_weight ? step / kStep : rows);
  }
  // Not the intrinsic: GCC 12 assumes that the intrinsic reads 8 bytes, and drops other stores.
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

// The weights of four columns of a block: four bytes for each output.
template <int F>
INLINE __m512i four_of(const uint8_t* p) {
  if constexpr (F == kEight) {
    // Two pairs of columns become the fours.
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17,
                                           1, 16, 0);
    return _mm512_permutexvar_epi16(order, _mm512_loadu_si512(p));
  } else {
    __m512i both = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    __m512i low = _mm512_and_si512(both, _mm512_set1_epi32(0x0f0f));
    __m512i high =
        _mm512_and_si512(_mm512_slli_epi32(both, 12), _mm512_set1_epi32(0x0f0f0000));
    __m512i codes = _mm512_or_si512(low, high);
    if constexpr (F == kFour) return codes;
    const __m128i halves = _mm_setr_epi8(FP4_HALVES);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(halves), codes);
  }
}

// Writes the tiles of a block's segment, which are prefetched two segments ahead.
template <int F>
INLINE void unpack(const uint8_t* p, long count, long columns, uint8_t* out) {
  constexpr long kBytes = kBlock * kStep * bits_of(F) / 8;
  const long ahead = 2 * count * kBlock * bits_of(F) / 8;
  for (long i = 0; i < count; i += kStep, p += kBytes, out += 64) {
    _mm_prefetch((const char*)(p + ahead), _MM_HINT_T0);
    _mm512_store_si512(out, four_of<F>(p));
  }
  for (long i = count; i < columns; i += kStep, out += 64)
    _mm512_store_si512(out, _mm512_setzero_si512());
}

// sums[n][part] of a segment of sixteen rows and N blocks.
template <int N, int P>
INLINE void multiply_tiles(const IntegerTiles& tiles, const uint8_t* x, const uint8_t* w,
                           int32_t sums[2][2][16][16]) {
  _tile_zero(0);
  if (P == 2) _tile_zero(1);
  if (N == 2) _tile_zero(2);
  if (N == 2 && P == 2) _tile_zero(3);
  for (long t = 0; t < tiles.steps; ++t) {
    _tile_loadd(6, w, 64);
    if (N == 2) _tile_loadd(7, w + tiles.weight_bytes(), 64);
    _tile_loadd(4, x, tiles.step);
    _tile_dpbssd(0, 4, 6);
    if (N == 2) _tile_dpbssd(2, 4, 7);
    if (P == 2) {
      _tile_loadd(5, x + tiles.tile_bytes(), tiles.step);
      _tile_dpbusd(1, 5, 6);
      if (N == 2) _tile_dpbusd(3, 5, 7);
    }
    x += P * tiles.tile_bytes();
    w += 64 / kStep * tiles.step;
  }
  _tile_stored(0, sums[0][0], 64);
  if (P == 2) _tile_stored(1, sums[0][1], 64);
  if (N == 2) _tile_stored(2, sums[1][0], 64);
  if (N == 2 && P == 2) _tile_stored(3, sums[1][1], 64);
}

// Some rows times some blocks.
struct IntegerTileProduct {
  const IntegerWeights& w;
  const Inputs& in;
  const IntegerTiles& tiles;
  const ByteRows& x;
  long row, rows, block, num_blocks;
  float* outputs;  // [rows, num_blocks, 16]

  template <int F>
  void run() const {
    alignas(64) uint8_t weights[kTileBlocks * kMaxColumns * kBlock];
    const long stride = kBlock * w.k * bits_of(F) / 8, columns = tiles.steps * tiles.step;
    for (long s = 0; s < w.num_segments; ++s) {
      const int32_t* segment = w.segments + 3 * s;
      const uint8_t* values = (const uint8_t*)w.values + block * stride +
                              segment[0] * kBlock * bits_of(F) / 8;
      for (long n = 0; n < num_blocks; ++n)
        unpack<F>(values + n * stride, segment[1], columns,
                  weights + n * tiles.weight_bytes());
      // Compilers see no read of memory in a load of tiles: the stores end before.
      __asm__ volatile("" ::: "memory");
      for (long r = 0; r < rows; r += 16)
        for (long n = 0; n < num_blocks; n += 2)
          num_blocks - n == 1 ? blocks<F, 1>(s, r, n, weights) : blocks<F, 2>(s, r, n, weights);
    }
  }

 private:
  template <int F, int N>
  INLINE void blocks(long s, long r, long n, const uint8_t* weights) const {
    alignas(64) int32_t sums[2][2][16][16];
    const uint8_t *bytes = x.at(tiles, row + r, s), *at = weights + n * tiles.weight_bytes();
    if (tiles.parts == 2)
      multiply_tiles<N, 2>(tiles, bytes, at, sums);
    else
      multiply_tiles<N, 1>(tiles, bytes, at, sums);
    for (long i = 0; i < std::min(16l, rows - r); ++i) add_row<F, N>(s, r + i, n, i, sums);
  }

  // In the order and by the operations of products without tiles.
  template <int F, int N>
  INLINE void add_row(long s, long r, long n, long i, int32_t sums[2][2][16][16]) const {
    const long of_scales = w.num_scales * kBlock, place = (row + r) * w.num_segments + s;
    const __m512i less = _mm512_set1_epi32(F == kFour && !w.offsets ? 8 * in.sums[place] : 0);
    const __m512 by = _mm512_set1_ps(in.scales[place]);
    const __m512 sum = _mm512_set1_ps(in.scales[place] * (float)in.sums[place]);
    for (int m = 0; m < N; ++m) {
      __m512i dots = _mm512_load_si512(sums[m][0][i]);
      if (tiles.parts == 2)
        dots = _mm512_add_epi32(_mm512_slli_epi32(dots, 8), _mm512_load_si512(sums[m][1][i]));
      const long at = (block + n + m) * of_scales + w.segments[3 * s + 2] * kBlock;
      float* output = outputs + (r * num_blocks + n + m) * kBlock;
      __m512 total = s == 0 ? _mm512_setzero_ps() : load(output);
      __m512 dot = _mm512_cvtepi32_ps(_mm512_sub_epi32(dots, less));
      total = _mm512_fmadd_ps(dot, _mm512_mul_ps(load(w.scales + at), by), total);
      if (w.offsets) total = _mm512_fmadd_ps(load(w.offsets + at), sum, total);
      _mm512_storeu_ps(output, total);
    }
  }
};

// Before and after a thread's use of integer_tiles.
inline void begin_integer_tiles(const IntegerTiles& tiles, long rows) {
  configure_tiles(std::min(16l, rows), tiles.step);
}
inline void end_integer_tiles() { amx_end(); }

// Writes floats [rows, num_blocks, 16] for up to kTileRows rows and kTileBlocks blocks.
inline void integer_tiles(const IntegerTileProduct& product) {
  if (product.w.is_fp4)
    product.run<kFp4>();
  else if (product.w.bits == 4)
    product.run<kFour>();
  else
    product.run<kEight>();
}

#else

inline bool integer_tiles_fit(const IntegerTiles&, long) { return false; }

#endif

}  // namespace trimaran
