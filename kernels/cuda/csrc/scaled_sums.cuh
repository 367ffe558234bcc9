// The scales of a tile's sums in a product of FP8 or INT8.
#pragma once

#include "gemm_tiles.cuh"

namespace {

// Whether a tile is so wide that its products and scales would not fit registers at once.
#ifdef GEMM_GROUPS
constexpr bool kIsWide = GEMM_PRODUCT_CHUNKS < GEMM_CHUNKS;
#else
constexpr bool kIsWide = GEMM_MI * kSums > (GEMM_WARPGROUPS < 3 ? 96 : 48);
#endif

// Those of this thread's columns, read while the tile is multiplied, and of its rows, which the
// preceding kernel writes. Scales of a wide tile wait in the first-level cache.
struct Scales {
    float2 of_columns[kIsWide ? 1 : kColumns / 8];
    float of_rows[GEMM_MI][2];
    const float* first;
    int columns;  // of the product, less this thread's first one

    __device__ __forceinline__ Scales(const Arguments& args, const Tile& tile) {
        const int own = tile.column * kOutColumns + 2 * (threadIdx.x % 4);
        first = args.scales_w + own;
        columns = args.columns - own;
        if constexpr (kIsWide) {
            const int line = 32 * (threadIdx.x % 32);
            if (line < kOutColumns) touch(first + min(line, columns - 2));
            if (kIsGated && line < kOutColumns) touch(first + args.columns + min(line, columns - 2));
        } else {
#pragma unroll
            for (int n = 0; n < kColumns / 8; ++n) of_columns[n] = load(args, n);
        }
    }

    static __device__ __forceinline__ void touch(const float* scale) {
        float unused;
        asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(unused) : "l"(scale));
    }

    // Those of the n-th eight columns.
    __device__ __forceinline__ float2 load(const Arguments& args, int n) const {
        const int is_up = 8 * n >= kOutColumns;
        // Columns behind the last one are not stored. Columns are even in number.
        const int column = min(8 * n - is_up * kOutColumns, columns - 2);
        return __ldg(reinterpret_cast<const float2*>(first + is_up * args.columns + column));
    }

#ifdef GEMM_GROUPS
    // Sums of each group have been multiplied by its scale.
    __device__ __forceinline__ void load_rows(const Arguments&, const Tile&) {
#pragma unroll
        for (int i = 0; i < GEMM_MI; ++i) of_rows[i][0] = of_rows[i][1] = 1.0f;
    }
#else
    // After rows of x have arrived.
    __device__ __forceinline__ void load_rows(const Arguments& args, const Tile& tile) {
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < GEMM_MI; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = tile.row * kRows + (threadIdx.x / 128 * GEMM_MI + i) * 64 +
                                warp * 16 + 8 * half + lane / 4;
                of_rows[i][half] = __ldcg(args.scales_x + min(row, args.rows - 1));
            }
        }
    }
#endif

    // `sums` are `totals` times their scales; both may be the same.
    __device__ __forceinline__ void apply(const Arguments& args,
                                          const Sum (&totals)[GEMM_MI][kSums],
                                          float (&sums)[GEMM_MI][kSums]) const {
#pragma unroll
        for (int tile = 0; tile < kSums / 4; ++tile) {
            float2 both;
            if constexpr (kIsWide) {
                both = load(args, tile);
            } else {
                both = of_columns[tile];
            }
#pragma unroll
            for (int i = 0; i < GEMM_MI; ++i) {
#pragma unroll
                for (int n = 4 * tile; n < 4 * tile + 4; ++n) {
                    sums[i][n] = static_cast<float>(totals[i][n]) *
                                 (of_rows[i][n / 2 % 2] * (n % 2 ? both.y : both.x));
                }
            }
        }
    }
};

#ifdef GEMM_GROUPS
// Those of each row of x in each stage of the ring.
__shared__ __align__(16) float group_scales[GEMM_STAGES][kRows];

// Those of this thread's rows.
__device__ __forceinline__ void load_group(int stage, float (&scales)[GEMM_MI][2]) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < GEMM_MI; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            scales[i][half] = group_scales[stage][(threadIdx.x / 128 * GEMM_MI + i) * 64 +
                                                  warp * 16 + 8 * half + lane / 4];
        }
    }
}
#endif

}  // namespace
