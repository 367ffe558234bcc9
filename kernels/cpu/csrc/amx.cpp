#include "amx.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

namespace trimaran {

#if HAS_AMX

long amx_packed_size(long rows, long k) { return (rows + 15) / 16 * 16 * k; }

void amx_pack_rows(const bf16* x, long x_stride, long rows, long k, long block, bf16* packed) {
  long first = block * 16, count = rows - first < 16 ? rows - first : 16;
  float* out = (float*)(packed + first * k);
  for (long i = 0; i < k; i += 32, out += 256) {
    __m512 v[16];
    for (long r = 0; r < 16; ++r)
      v[r] = r < count ? _mm512_loadu_ps(x + (first + r) * x_stride + i) : _mm512_setzero_ps();
    transpose16(v);
    for (long pair = 0; pair < 16; ++pair) _mm512_storeu_ps(out + 16 * pair, v[pair]);
  }
}

bool amx_is_usable() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool usable = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return usable;
}

void amx_begin() {
  // Static, not on the stack: GCC 12 assumes that the instruction reads 8 bytes, and drops
  // stores to the others.
  alignas(64) static const struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
}

void amx_end() { _tile_release(); }

namespace {

// Tiles 0 to 3 hold sums, 4 and 5 weights, 6 and 7 rows of x.
template <int W, int X>
void product(const bf16* x, long x_block, const bf16* w, long k, long ahead,
             float sums[2][2][16][16]) {
  _tile_zero(0);
  if (X == 2) _tile_zero(1);
  if (W == 2) _tile_zero(2);
  if (W == 2 && X == 2) _tile_zero(3);
  for (long i = 0; i < k; i += 32) {
    _tile_loadd(4, w + i, k * 2);
    if (W == 2) _tile_loadd(5, w + 16 * k + i, k * 2);
    _tile_loadd(6, x + 16 * i, 64);
    if (X == 2) _tile_loadd(7, x + x_block + 16 * i, 64);
    if (ahead)
      for (int n = 0; n < 16 * W; ++n)
        _mm_prefetch((const char*)(w + n * k + i + ahead), _MM_HINT_T0);
    _tile_dpbf16ps(0, 4, 6);
    if (X == 2) _tile_dpbf16ps(1, 4, 7);
    if (W == 2) _tile_dpbf16ps(2, 5, 6);
    if (W == 2 && X == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums[0][0], 64);
  if (X == 2) _tile_stored(1, sums[0][1], 64);
  if (W == 2) _tile_stored(2, sums[1][0], 64);
  if (W == 2 && X == 2) _tile_stored(3, sums[1][1], 64);
}

}  // namespace

void amx_tile(const AmxInput& x, long block, int num_blocks, const bf16* w, int num_weights,
              bool fetches_ahead, float sums[2][2][16][16]) {
  const bf16* rows = x.packed + block * 16 * x.k;
  long next = 16 * x.k, ahead = fetches_ahead ? 16 * num_weights * x.k : 0;
  if (num_weights == 2)
    num_blocks == 2 ? product<2, 2>(rows, next, w, x.k, ahead, sums)
                    : product<2, 1>(rows, next, w, x.k, ahead, sums);
  else
    num_blocks == 2 ? product<1, 2>(rows, next, w, x.k, ahead, sums)
                    : product<1, 1>(rows, next, w, x.k, ahead, sums);
}

#else

bool amx_is_usable() { return false; }

#endif

}  // namespace trimaran
