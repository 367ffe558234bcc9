// Vectors of 16 floats over the three weight types, and the dot products built from them.
//
// Every sum over K runs through one accumulator per output, in order, and ends in one fixed
// tree. An output's bits therefore never depend on the number of rows or outputs beside it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HAS_AVX512 0
#include "avx2.h"
#else
#error "these kernels need AVX-512 F, BW and VL, or AVX2, FMA and F16C"
#endif

#define INLINE inline __attribute__((always_inline))

namespace trimaran {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Accumulators of 16 floats that fit in the registers beside their operands.
constexpr int kMaxSums = HAS_AVX512 ? 24 : 8;

INLINE __mmask16 mask_of(long count) { return (__mmask16)((1u << count) - 1); }

INLINE __m512 from_bits(__m256i bits, const bf16*) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
INLINE __m512 from_bits(__m256i bits, const f16*) { return _mm512_cvtph_ps(bits); }

INLINE __m512 load(const float* p) { return _mm512_loadu_ps(p); }
template <class T>
INLINE __m512 load(const T* p) {
  return from_bits(_mm256_loadu_si256((const __m256i*)p), p);
}
INLINE __m512 load(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
template <class T>
INLINE __m512 load(const T* p, __mmask16 m) {
  return from_bits(_mm256_maskz_loadu_epi16(m, p), p);
}

INLINE __m256i to_bits(__m512 v, const bf16*) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(v);
#else
  __m512i bits = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  up = _mm512_mask_mov_epi32(up, is_nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
#endif
}
INLINE __m256i to_bits(__m512 v, const f16*) {
  return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
}

INLINE void store(float* p, __m512 v, __mmask16 m) { _mm512_mask_storeu_ps(p, m, v); }
template <class T>
INLINE void store(T* p, __m512 v, __mmask16 m) {
  _mm256_mask_storeu_epi16(p, m, to_bits(v, p));
}
INLINE void store4(float* p, __m128 v) { _mm_storeu_ps(p, v); }
template <class T>
INLINE void store4(T* p, __m128 v) {
  _mm_storel_epi64((__m128i*)p, _mm256_castsi256_si128(to_bits(_mm512_castps128_ps512(v), p)));
}

// Rounds to the type and back: the value after storing.
INLINE __m512 rounded(__m512 v, const float*) { return v; }
template <class T>
INLINE __m512 rounded(__m512 v, const T* p) {
  return from_bits(to_bits(v, p), p);
}

// The sums of four vectors, in the lanes of one.
INLINE __m128 sum4(__m512 a, __m512 b, __m512 c, __m512 d) {
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  __m512 v = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
  __m256 w = _mm256_add_ps(_mm512_castps512_ps256(v),
                           _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
  return _mm_add_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
}

INLINE float sum1(__m512 v) {
  __m512 zero = _mm512_setzero_ps();
  return _mm_cvtss_f32(sum4(v, zero, zero, zero));
}

// One step of a dot product over `Step<T>::width` elements.
template <class T>
struct Step {
  static constexpr int width = 16;
  using Vector = __m512;
  static INLINE Vector get(const T* p) { return load(p); }
  static INLINE Vector get(const T* p, long count) { return load(p, mask_of(count)); }
  static INLINE __m512 add(__m512 acc, Vector x, Vector w) { return _mm512_fmadd_ps(x, w, acc); }
};

#ifdef __AVX512BF16__
template <>
struct Step<bf16> {
  static constexpr int width = 32;
  using Vector = __m512i;
  static INLINE Vector get(const bf16* p) { return _mm512_loadu_si512(p); }
  static INLINE Vector get(const bf16* p, long count) {
    return _mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), p);
  }
  static INLINE __m512 add(__m512 acc, Vector x, Vector w) {
    return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)w);
  }
};
#endif

// Dot products of R rows of x with 4 * Q rows of w: sums[r][q] holds four of them. w is
// prefetched `ahead` elements in advance; 0 disables prefetching.
template <class T, int R, int Q>
INLINE void dot_tile(const T* x, long x_stride, const T* w, long w_stride, long k,
                     __m128 sums[R][Q], long ahead = 0) {
  constexpr int N = 4 * Q;
  constexpr int width = Step<T>::width;
  __m512 acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) acc[r][n] = _mm512_setzero_ps();
  long i = 0;
  for (; i + width <= k; i += width) {
    typename Step<T>::Vector ws[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      ws[n] = Step<T>::get(w + n * w_stride + i);
      if (ahead) _mm_prefetch((const char*)(w + n * w_stride + i + ahead), _MM_HINT_T0);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      auto xs = Step<T>::get(x + r * x_stride + i);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) acc[r][n] = Step<T>::add(acc[r][n], xs, ws[n]);
    }
  }
  if (i < k) {
    typename Step<T>::Vector ws[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) ws[n] = Step<T>::get(w + n * w_stride + i, k - i);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      auto xs = Step<T>::get(x + r * x_stride + i, k - i);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) acc[r][n] = Step<T>::add(acc[r][n], xs, ws[n]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q)
      sums[r][q] = sum4(acc[r][4 * q], acc[r][4 * q + 1], acc[r][4 * q + 2], acc[r][4 * q + 3]);
}

template <class T>
INLINE float dot(const T* x, const T* w, long k) {
  constexpr int width = Step<T>::width;
  __m512 acc = _mm512_setzero_ps();
  long i = 0;
  for (; i + width <= k; i += width)
    acc = Step<T>::add(acc, Step<T>::get(x + i), Step<T>::get(w + i));
  if (i < k) acc = Step<T>::add(acc, Step<T>::get(x + i, k - i), Step<T>::get(w + i, k - i));
  return sum1(acc);
}

// e^x for x <= 0 or any moderate x: error below 2 units in the last place of a float.
INLINE __m512 exp16(__m512 x) {
  const __m512 log2e = _mm512_set1_ps(1.44269504088896341f);
  x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-104.0f));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, log2e), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

}  // namespace trimaran
