// y = x @ w.T + bias for bf16 by tile products: 32 outputs of 32 rows at a time.
//
// The weights are the first operand in their memory layout; x is packed. The order of an
// output's sum over k does not depend on the other outputs or rows.
#pragma once

#include <algorithm>
#include <vector>

#include "amx.h"
#include "api.h"
#include "pool.h"

namespace trimaran {

#if HAS_AMX

// Whether the shape fits: the tail of the outputs that fills no tile is computed elsewhere.
inline bool amx_fits(const LinearArgs& a) {
  return a.dtype == kBfloat16 && a.k % 32 == 0 && a.outputs >= 16 && amx_is_usable();
}

template <class Out>
void amx_outputs(const LinearArgs& a, const AmxInput& x, long first, long end) {
  const bf16* w = (const bf16*)a.weight;
  const bf16* bias = (const bf16*)a.bias;
  long blocks = (a.rows + 15) / 16;
  alignas(64) float sums[2][2][16][16];
  for (long block = 0; block < blocks; block += 2) {
    int xs = (int)std::min(2l, blocks - block);
    for (long n = first; n < end; n += 32) {
      int ws = end - n >= 32 ? 2 : 1;
      amx_tile(x, block, xs, w + n * a.k, ws, block == 0 && n + 32 < a.outputs, sums);
      for (int i = 0; i < ws; ++i)
        for (int j = 0; j < xs; ++j) {
          __m512 v[16];
          for (int r = 0; r < 16; ++r) v[r] = _mm512_load_ps(sums[i][j][r]);
          transpose16(v);
          long row = (block + j) * 16, out = n + 16 * i;
          __m512 add = bias ? load(bias + out) : _mm512_setzero_ps();
          for (long r = 0; r < std::min(16l, a.rows - row); ++r)
            store((Out*)a.y + (row + r) * a.outputs + out, _mm512_add_ps(v[r], add),
                  (__mmask16)0xffff);
        }
    }
  }
}

// Computes outputs 0 to the last multiple of 16 and returns that multiple.
inline long amx_linear(const LinearArgs& a) {
  // Kept for the next call: one caller at a time.
  static std::vector<bf16> packed;
  if ((long)packed.size() < amx_packed_size(a.rows, a.k))
    packed.resize(amx_packed_size(a.rows, a.k));
  Pool& pool = Pool::get();
  pool.each((a.rows + 15) / 16, [&](long block) {
    amx_pack_rows((const bf16*)a.x, a.x_stride, a.rows, a.k, block, packed.data());
  });
  AmxInput x{packed.data(), a.rows, a.k};
  long outputs = a.outputs / 16 * 16;
  // Work items of about 64 KiB of weights, and at least as many items as threads.
  long width = std::max(32l, 32768 / a.k / 32 * 32);
  long share = ((outputs + pool.size() - 1) / pool.size() + 31) / 32 * 32;
  width = std::min(width, share);
  pool.each((outputs + width - 1) / width, [&](long item) {
    long first = item * width, end = std::min(first + width, outputs);
    amx_begin();
    if (a.float_output)
      amx_outputs<float>(a, x, first, end);
    else
      amx_outputs<bf16>(a, x, first, end);
    amx_end();
  });
  return outputs;
}

#else

inline bool amx_fits(const LinearArgs&) { return false; }
inline long amx_linear(const LinearArgs&) { return 0; }

#endif

}  // namespace trimaran
