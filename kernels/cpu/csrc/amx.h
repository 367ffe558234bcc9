// Products of bf16 matrices by tile instructions, if compiler and processor support them.
#pragma once

#include "vec.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

namespace trimaran {

// Whether this process may use tiles; requests permission from Linux the first time.
bool amx_is_usable();

#if HAS_AMX

// A block of 32 outputs: y[row][n] for all rows of a packed x. Outputs go to
// `store(row, n, vector of 16 outputs)`.
struct AmxInput {
  const bf16* packed;  // see amx_pack
  long rows, k;
};

// Elements that amx_pack writes for this many rows.
long amx_packed_size(long rows, long k);

// Packs 16 rows of x (fewer at the end, then zeros): 32 elements of k at a time become 16
// rows of 16 pairs, one pair from each row of x, as the second operand of a tile product.
void amx_pack_rows(const bf16* x, long x_stride, long rows, long k, long block, bf16* packed);

// sums[n][row] for 16 or 32 rows of weights and 16 or 32 rows of x, which start at block.
void amx_tile(const AmxInput& x, long block, int num_blocks, const bf16* w, int num_weights,
              bool fetches_ahead, float sums[2][2][16][16]);

// Before and after a thread's use of tiles.
void amx_begin();
void amx_end();

// Rows become columns of 16 vectors of 16 words.
INLINE void transpose16(__m512 v[16]) {
  __m512 t[16], u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 1]);
    __m512d c = _mm512_castps_pd(t[i + 2]), d = _mm512_castps_pd(t[i + 3]);
    u[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    u[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    u[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    u[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512 even_ab = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88);
    __m512 odd_ab = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd);
    __m512 even_cd = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88);
    __m512 odd_cd = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
    v[i] = _mm512_shuffle_f32x4(even_ab, even_cd, 0x88);
    v[i + 4] = _mm512_shuffle_f32x4(odd_ab, odd_cd, 0x88);
    v[i + 8] = _mm512_shuffle_f32x4(even_ab, even_cd, 0xdd);
    v[i + 12] = _mm512_shuffle_f32x4(odd_ab, odd_cd, 0xdd);
  }
}

#endif

}  // namespace trimaran
