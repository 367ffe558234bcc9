// Numbers of a KV cache of one byte each, without their scales.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "api.h"
#include "vec.h"

namespace trimaran {

// The value of an e4m3 byte: a sign, 4 bits of exponent with bias 7, 3 bits of mantissa.
inline float e4m3_value(int byte) {
  int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10)
                        : std::ldexp((float)mantissa, -9);
  return byte & 0x80 ? -size : size;
}

// The numbers of all bytes, in a table of the dtype of queries.
template <class T>
const T* values_of_bytes(long cache_type) {
  auto fill = [](bool is_float8) {
    std::array<T, 256> values;
    for (int byte = 0; byte < 256; ++byte)
      store(values.data() + byte,
            _mm512_set1_ps(is_float8 ? e4m3_value(byte) : (float)(int8_t)byte), mask_of(1));
    return values;
  };
  static const std::array<T, 256> of_float8 = fill(true), of_int8 = fill(false);
  return (cache_type == kFloat8 ? of_float8 : of_int8).data();
}

}  // namespace trimaran
