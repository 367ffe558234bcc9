// Forms of integer weights, and the rows of x as integers.
//
// x becomes 16-bit integers with a power of two as the scale of each segment, which holds bf16
// values within 2^-7 of the segment's largest exactly, or bytes with a scale a row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "api.h"
#include "vec.h"

namespace trimaran {

// Outputs of a block, and columns that memory holds together.
constexpr long kBlock = 16;
constexpr long kStep = 4;

// The numbers of a weight: integers of 4 or 8 bits, or FP4 (E2M1) in 4 bits.
enum Form { kFour, kEight, kFp4 };
constexpr long bits_of(int form) { return form == kEight ? 8 : 4; }
// Twice the number of each FP4 code.
#define FP4_HALVES 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
INLINE float to_float(f16 x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits))); }

INLINE uint32_t magnitude_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffff;
}

// The rows of x as integers. Rows of floats become two: the rest of the first, 2^-15 of its unit.
struct Inputs {
  std::vector<int16_t> values;  // [rows, k]
  std::vector<float> scales;    // [rows, segments]
  std::vector<int32_t> sums;    // [rows, segments]
  std::vector<float> row_scales;
  std::vector<float> floats;
  long rows;
};

constexpr uint32_t kInfinite = 0x7f800000;

// The power of two by which values below 2 * 2^exponent become less than 2^15.
INLINE float power_for(uint32_t largest) {
  int exponent = std::max((int)(largest >> 23) - 127, -100);
  return std::ldexp(1.0f, 14 - exponent);
}

// The nearest integer, halves to even, of a number below 2^22: in vectors too, unlike nearbyint.
INLINE float nearest(float x) { return x + 12582912.0f - 12582912.0f; }

inline void quantize_segment(const float* x, long count, bool has_rest, int16_t* values,
                             int16_t* rest, float* scale, float* rest_scale,
                             int32_t sums[2]) {
  uint32_t largest = 0;
  for (long i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(x[i]));
  sums[0] = sums[1] = 0;
  if (largest >= kInfinite) {
    // Infinities and NaN in, NaN out.
    std::fill(values, values + count, (int16_t)0);
    if (has_rest) std::fill(rest, rest + count, (int16_t)0);
    *scale = *rest_scale = NAN;
    return;
  }
  float by = power_for(largest);
  *scale = 1.0f / by;
  *rest_scale = *scale / 32768.0f;
  // Compilers turn these loops into vector instructions: clamping follows the conversion.
  if (!has_rest) {
    int32_t sum = 0;
    for (long i = 0; i < count; ++i) {
      int32_t whole = std::min((int32_t)nearest(x[i] * by), 32767);
      values[i] = (int16_t)whole;
      sum += whole;
    }
    sums[0] = sum;
    return;
  }
  int32_t sum = 0, rest_sum = 0;
  for (long i = 0; i < count; ++i) {
    float scaled = x[i] * by;
    int32_t whole = std::min((int32_t)nearest(scaled), 32767);
    int32_t less = (int32_t)nearest((scaled - (float)whole) * 32768.0f);
    less = std::min(std::max(less, -32767), 32767);
    values[i] = (int16_t)whole;
    rest[i] = (int16_t)less;
    sum += whole;
    rest_sum += less;
  }
  sums[0] = sum;
  sums[1] = rest_sum;
}

// Signed bytes of a row, with the weight's scale of inputs, or one scale: 1/127 of the largest.
inline void quantize_row(const IntegerWeights& w, const float* x, int16_t* values,
                         float* scales, int32_t* sums, float* row_scale) {
  float largest = 0.0f;
  bool is_finite = true;
  for (long i = 0; i < w.k; ++i) {
    is_finite &= magnitude_bits(x[i]) < kInfinite;
    largest = std::max(largest, std::fabs(x[i]));
  }
  float scale = w.input_scale > 0 ? (float)w.input_scale : std::max(largest, 1e-10f) / 127.0f;
  *row_scale = is_finite ? scale : NAN;
  float by = is_finite ? 1.0f / *row_scale : 0.0f;
  for (long s = 0; s < w.num_segments; ++s) {
    const int32_t* segment = w.segments + 3 * s;
    int32_t sum = 0;
    for (long i = segment[0]; i < segment[0] + segment[1]; ++i) {
      float whole = is_finite ? std::nearbyintf(x[i] * by) : 0.0f;
      values[i] = (int16_t)std::min(std::max(whole, -127.0f), 127.0f);
      sum += values[i];
    }
    sums[s] = sum;
    scales[s] = 1.0f;
  }
}

template <class T>
void quantize(const IntegerArgs& a, const IntegerWeights& w, long row, Inputs& in) {
  constexpr bool kHasRest = sizeof(T) == 4;
  long copies = kHasRest && !w.has_byte_inputs ? 2 : 1, at = row * copies;
  const T* x = (const T*)a.x + row * a.x_stride;
  float* floats = in.floats.data() + row * w.k;
  if (w.order)
    for (long i = 0; i < w.k; ++i) floats[i] = w.order[i] < 0 ? 0.0f : to_float(x[w.order[i]]);
  else
    for (long i = 0; i < w.k; ++i) floats[i] = to_float(x[i]);
  int16_t* values = in.values.data() + at * w.k;
  float* scales = in.scales.data() + at * w.num_segments;
  int32_t* sums = in.sums.data() + at * w.num_segments;
  for (long copy = 0; copy < copies; ++copy) in.row_scales[at + copy] = 1.0f;
  if (w.has_byte_inputs)
    return quantize_row(w, floats, values, scales, sums, &in.row_scales[at]);
  for (long s = 0; s < w.num_segments; ++s) {
    const int32_t* segment = w.segments + 3 * s;
    int32_t both[2];
    float rest_scale;
    long first = segment[0];
    quantize_segment(floats + first, segment[1], copies == 2, values + first,
                     values + w.k + first, scales + s, &rest_scale, both);
    sums[s] = both[0];
    if (copies == 2) {
      scales[w.num_segments + s] = rest_scale;
      sums[w.num_segments + s] = both[1];
    }
  }
}

}  // namespace trimaran
