// The AVX-512 operations that these kernels use, for processors that have AVX2 alone. Each
// consists of two AVX2 operations, under the name of the AVX-512 intrinsic. Only the operations
// in use are implemented; comments state their limits.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace trimaran {
namespace avx2 {

#define AVX2_INLINE inline __attribute__((always_inline))

struct Floats {
  __m256 lo, hi;
};
struct Doubles {
  __m256d lo, hi;
};
struct Ints {
  __m256i lo, hi;
};

// All bits of the lanes in a mask.
AVX2_INLINE __m256i half_of(uint32_t mask) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)mask), bits), bits);
}
AVX2_INLINE Ints lanes_of(__mmask16 mask) {
  return {half_of(mask & 0xffu), half_of(mask >> 8)};
}

AVX2_INLINE Floats set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
AVX2_INLINE Ints set1_epi32(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
AVX2_INLINE Floats setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
AVX2_INLINE Doubles setzero_pd() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }

#define EACH_HALF(type, name, of_half)                        \
  AVX2_INLINE type name(type a, type b) {                     \
    return {of_half(a.lo, b.lo), of_half(a.hi, b.hi)};        \
  }
EACH_HALF(Floats, add_ps, _mm256_add_ps)
EACH_HALF(Floats, sub_ps, _mm256_sub_ps)
EACH_HALF(Floats, mul_ps, _mm256_mul_ps)
EACH_HALF(Floats, div_ps, _mm256_div_ps)
EACH_HALF(Floats, min_ps, _mm256_min_ps)
EACH_HALF(Floats, max_ps, _mm256_max_ps)
EACH_HALF(Floats, unpacklo_ps, _mm256_unpacklo_ps)
EACH_HALF(Floats, unpackhi_ps, _mm256_unpackhi_ps)
EACH_HALF(Doubles, unpacklo_pd, _mm256_unpacklo_pd)
EACH_HALF(Doubles, unpackhi_pd, _mm256_unpackhi_pd)
EACH_HALF(Doubles, add_pd, _mm256_add_pd)
EACH_HALF(Ints, add_epi32, _mm256_add_epi32)
EACH_HALF(Ints, and_si512, _mm256_and_si256)
EACH_HALF(Ints, xor_si512, _mm256_xor_si256)
EACH_HALF(Ints, max_epi32, _mm256_max_epi32)
#undef EACH_HALF

AVX2_INLINE Floats fmadd_ps(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
AVX2_INLINE Floats fnmadd_ps(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}

AVX2_INLINE Ints slli_epi32(Ints v, int by) {
  return {_mm256_slli_epi32(v.lo, by), _mm256_slli_epi32(v.hi, by)};
}
AVX2_INLINE Ints srli_epi32(Ints v, int by) {
  return {_mm256_srli_epi32(v.lo, by), _mm256_srli_epi32(v.hi, by)};
}
AVX2_INLINE Ints srai_epi32(Ints v, int by) {
  return {_mm256_srai_epi32(v.lo, by), _mm256_srai_epi32(v.hi, by)};
}

AVX2_INLINE Doubles castps_pd(Floats v) {
  return {_mm256_castps_pd(v.lo), _mm256_castps_pd(v.hi)};
}
AVX2_INLINE Floats castpd_ps(Doubles v) {
  return {_mm256_castpd_ps(v.lo), _mm256_castpd_ps(v.hi)};
}
AVX2_INLINE Ints castps_si512(Floats v) {
  return {_mm256_castps_si256(v.lo), _mm256_castps_si256(v.hi)};
}
AVX2_INLINE Floats castsi512_ps(Ints v) {
  return {_mm256_castsi256_ps(v.lo), _mm256_castsi256_ps(v.hi)};
}
AVX2_INLINE __m256 castps512_ps256(Floats v) { return v.lo; }
AVX2_INLINE __m128 castps512_ps128(Floats v) { return _mm256_castps256_ps128(v.lo); }
AVX2_INLINE Floats castps128_ps512(__m128 v) {
  return {_mm256_castps128_ps256(v), _mm256_setzero_ps()};
}
AVX2_INLINE float cvtss_f32(Floats v) { return _mm256_cvtss_f32(v.lo); }
// Callers use only the upper half.
AVX2_INLINE __m256d extractf64x4_pd(Doubles v, int) { return v.hi; }

AVX2_INLINE Doubles cvtps_pd(__m256 v) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(v)),
          _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1))};
}
AVX2_INLINE Ints cvtepu16_epi32(__m256i v) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)),
          _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1))};
}
// The values must fit in 16 bits.
AVX2_INLINE __m256i cvtepi32_epi16(Ints v) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(v.lo, v.hi), 0xd8);
}
AVX2_INLINE Floats cvtph_ps(__m256i v) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(v)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
}
// Rounds to nearest; other modes are not used.
AVX2_INLINE __m256i cvtps_ph(Floats v, int) {
  return _mm256_set_m128i(_mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT));
}
AVX2_INLINE Floats roundscale_ps(Floats v, int) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(v.lo, kNearest), _mm256_round_ps(v.hi, kNearest)};
}

// v * 2^n for whole n from -252 to 254, in two factors that are no denormals: only the last
// product rounds.
AVX2_INLINE __m256 scale_half(__m256 v, __m256 n) {
  __m256i whole = _mm256_cvtps_epi32(n), one = _mm256_set1_epi32(127);
  __m256i first = _mm256_srai_epi32(whole, 1), second = _mm256_sub_epi32(whole, first);
  __m256i a = _mm256_slli_epi32(_mm256_add_epi32(first, one), 23);
  __m256i b = _mm256_slli_epi32(_mm256_add_epi32(second, one), 23);
  return _mm256_mul_ps(_mm256_mul_ps(v, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
}
AVX2_INLINE Floats scalef_ps(Floats v, Floats n) {
  return {scale_half(v.lo, n.lo), scale_half(v.hi, n.hi)};
}

AVX2_INLINE Floats maskz_mov_ps(__mmask16 m, Floats v) {
  Ints lanes = lanes_of(m);
  return {_mm256_and_ps(v.lo, _mm256_castsi256_ps(lanes.lo)),
          _mm256_and_ps(v.hi, _mm256_castsi256_ps(lanes.hi))};
}
AVX2_INLINE Floats maskz_sub_ps(__mmask16 m, Floats a, Floats b) {
  return maskz_mov_ps(m, sub_ps(a, b));
}
AVX2_INLINE Floats mask_max_ps(Floats other, __mmask16 m, Floats a, Floats b) {
  Ints lanes = lanes_of(m);
  Floats most = max_ps(a, b);
  return {_mm256_blendv_ps(other.lo, most.lo, _mm256_castsi256_ps(lanes.lo)),
          _mm256_blendv_ps(other.hi, most.hi, _mm256_castsi256_ps(lanes.hi))};
}
AVX2_INLINE Ints mask_mov_epi32(Ints other, __mmask16 m, Ints v) {
  Ints lanes = lanes_of(m);
  return {_mm256_blendv_epi8(other.lo, v.lo, lanes.lo),
          _mm256_blendv_epi8(other.hi, v.hi, lanes.hi)};
}

AVX2_INLINE __mmask16 mask_from(__m256 lo, __m256 hi) {
  return (__mmask16)(_mm256_movemask_ps(lo) | _mm256_movemask_ps(hi) << 8);
}
template <int kHow>
AVX2_INLINE __mmask16 compare(Floats a, Floats b) {
  return mask_from(_mm256_cmp_ps(a.lo, b.lo, kHow), _mm256_cmp_ps(a.hi, b.hi, kHow));
}
AVX2_INLINE __mmask16 mask_cmpge_epi32_mask(__mmask16 m, Ints a, Ints b) {
  __m256i lo = _mm256_cmpgt_epi32(b.lo, a.lo), hi = _mm256_cmpgt_epi32(b.hi, a.hi);
  return m & (__mmask16)~mask_from(_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi));
}

AVX2_INLINE Floats loadu_ps(const void* p) {
  return {_mm256_loadu_ps((const float*)p), _mm256_loadu_ps((const float*)p + 8)};
}
AVX2_INLINE void storeu_ps(void* p, Floats v) {
  _mm256_storeu_ps((float*)p, v.lo);
  _mm256_storeu_ps((float*)p + 8, v.hi);
}
AVX2_INLINE void storeu_si512(void* p, Ints v) {
  _mm256_storeu_si256((__m256i*)p, v.lo);
  _mm256_storeu_si256((__m256i*)p + 1, v.hi);
}
AVX2_INLINE Floats maskz_loadu_ps(__mmask16 m, const float* p) {
  Ints lanes = lanes_of(m);
  return {_mm256_maskload_ps(p, lanes.lo), _mm256_maskload_ps(p + 8, lanes.hi)};
}
AVX2_INLINE void mask_storeu_ps(float* p, __mmask16 m, Floats v) {
  Ints lanes = lanes_of(m);
  _mm256_maskstore_ps(p, lanes.lo, v.lo);
  _mm256_maskstore_ps(p + 8, lanes.hi, v.hi);
}
// AVX2 has no masked stores of 16-bit words: words at a row's end are stored one by one.
AVX2_INLINE __m256i maskz_loadu_epi16(__mmask16 m, const void* p) {
  if (m == 0xffff) return _mm256_loadu_si256((const __m256i*)p);
  alignas(32) uint16_t words[16] = {};
  for (int i = 0; i < 16; ++i)
    if (m >> i & 1) words[i] = ((const uint16_t*)p)[i];
  return _mm256_load_si256((const __m256i*)words);
}
AVX2_INLINE void mask_storeu_epi16(void* p, __mmask16 m, __m256i v) {
  if (m == 0xffff) return _mm256_storeu_si256((__m256i*)p, v);
  alignas(32) uint16_t words[16];
  _mm256_store_si256((__m256i*)words, v);
  for (int i = 0; i < 16; ++i)
    if (m >> i & 1) ((uint16_t*)p)[i] = words[i];
}

AVX2_INLINE float reduce_max_ps(Floats v) {
  __m256 a = _mm256_max_ps(v.lo, v.hi);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
AVX2_INLINE double reduce_add_pd(Doubles v) {
  __m256d a = _mm256_add_pd(v.lo, v.hi);
  __m128d b = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
  return _mm_cvtsd_f64(_mm_add_sd(b, _mm_unpackhi_pd(b, b)));
}

}  // namespace avx2
}  // namespace trimaran

#undef AVX2_INLINE

// Some compilers define these as macros.
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_srai_epi32
#undef _mm512_extractf64x4_pd
#undef _mm512_cvtps_ph
#undef _mm512_roundscale_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_mask_cmp_ps_mask
#undef _mm512_mask_cmpge_epi32_mask

#define __m512 ::trimaran::avx2::Floats
#define __m512d ::trimaran::avx2::Doubles
#define __m512i ::trimaran::avx2::Ints
#define _mm512_set1_ps ::trimaran::avx2::set1_ps
#define _mm512_set1_epi32 ::trimaran::avx2::set1_epi32
#define _mm512_setzero_ps ::trimaran::avx2::setzero_ps
#define _mm512_setzero_pd ::trimaran::avx2::setzero_pd
#define _mm512_fmadd_ps ::trimaran::avx2::fmadd_ps
#define _mm512_fnmadd_ps ::trimaran::avx2::fnmadd_ps
#define _mm512_slli_epi32 ::trimaran::avx2::slli_epi32
#define _mm512_srli_epi32 ::trimaran::avx2::srli_epi32
#define _mm512_srai_epi32 ::trimaran::avx2::srai_epi32
#define _mm512_castps_pd ::trimaran::avx2::castps_pd
#define _mm512_castpd_ps ::trimaran::avx2::castpd_ps
#define _mm512_castps_si512 ::trimaran::avx2::castps_si512
#define _mm512_castsi512_ps ::trimaran::avx2::castsi512_ps
#define _mm512_castps512_ps256 ::trimaran::avx2::castps512_ps256
#define _mm512_castps512_ps128 ::trimaran::avx2::castps512_ps128
#define _mm512_castps128_ps512 ::trimaran::avx2::castps128_ps512
#define _mm512_cvtss_f32 ::trimaran::avx2::cvtss_f32
#define _mm512_extractf64x4_pd ::trimaran::avx2::extractf64x4_pd
#define _mm512_cvtps_pd ::trimaran::avx2::cvtps_pd
#define _mm512_cvtepu16_epi32 ::trimaran::avx2::cvtepu16_epi32
#define _mm512_cvtepi32_epi16 ::trimaran::avx2::cvtepi32_epi16
#define _mm512_cvtph_ps ::trimaran::avx2::cvtph_ps
#define _mm512_cvtps_ph ::trimaran::avx2::cvtps_ph
#define _mm512_roundscale_ps ::trimaran::avx2::roundscale_ps
#define _mm512_scalef_ps ::trimaran::avx2::scalef_ps
#define _mm512_maskz_mov_ps ::trimaran::avx2::maskz_mov_ps
#define _mm512_maskz_sub_ps ::trimaran::avx2::maskz_sub_ps
#define _mm512_mask_max_ps ::trimaran::avx2::mask_max_ps
#define _mm512_mask_mov_epi32 ::trimaran::avx2::mask_mov_epi32
#define _mm512_mask_cmpge_epi32_mask ::trimaran::avx2::mask_cmpge_epi32_mask
#define _mm512_loadu_ps ::trimaran::avx2::loadu_ps
#define _mm512_storeu_ps ::trimaran::avx2::storeu_ps
#define _mm512_storeu_si512 ::trimaran::avx2::storeu_si512
#define _mm512_maskz_loadu_ps ::trimaran::avx2::maskz_loadu_ps
#define _mm512_mask_storeu_ps ::trimaran::avx2::mask_storeu_ps
#define _mm512_reduce_max_ps ::trimaran::avx2::reduce_max_ps
#define _mm512_reduce_add_pd ::trimaran::avx2::reduce_add_pd
#define _mm512_add_ps ::trimaran::avx2::add_ps
#define _mm512_sub_ps ::trimaran::avx2::sub_ps
#define _mm512_mul_ps ::trimaran::avx2::mul_ps
#define _mm512_div_ps ::trimaran::avx2::div_ps
#define _mm512_min_ps ::trimaran::avx2::min_ps
#define _mm512_max_ps ::trimaran::avx2::max_ps
#define _mm512_unpacklo_ps ::trimaran::avx2::unpacklo_ps
#define _mm512_unpackhi_ps ::trimaran::avx2::unpackhi_ps
#define _mm512_unpacklo_pd ::trimaran::avx2::unpacklo_pd
#define _mm512_unpackhi_pd ::trimaran::avx2::unpackhi_pd
#define _mm512_add_pd ::trimaran::avx2::add_pd
#define _mm512_add_epi32 ::trimaran::avx2::add_epi32
#define _mm512_and_si512 ::trimaran::avx2::and_si512
#define _mm512_xor_si512 ::trimaran::avx2::xor_si512
#define _mm512_max_epi32 ::trimaran::avx2::max_epi32
#define _mm512_cmp_ps_mask(a, b, how) ::trimaran::avx2::compare<how>(a, b)
#define _mm512_mask_cmp_ps_mask(m, a, b, how) ((m) & ::trimaran::avx2::compare<how>(a, b))
#define _mm256_maskz_loadu_epi16 ::trimaran::avx2::maskz_loadu_epi16
#define _mm256_mask_storeu_epi16 ::trimaran::avx2::mask_storeu_epi16
