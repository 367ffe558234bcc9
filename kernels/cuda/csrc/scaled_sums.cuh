// The scales of a tile's sums in a product of FP8.
#pragma once

#include "gemm_tiles.cuh"

namespace {

// Those of this thread's columns, read while the tile is multiplied, and of its rows, which the
// preceding kernel writes.
struct Scales {
    float2 of_columns[kColumns / 8];
    float of_rows[GEMM_MI][2];

    __device__ __forceinline__ Scales(const Arguments& args, const Tile& tile) {
        const int first = tile.column * kOutColumns + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
            const int is_up = 8 * n >= kOutColumns;
            // Columns behind the last one are not stored. Columns are even in number.
            const int column = min(first + 8 * n - is_up * kOutColumns, args.columns - 2);
            of_columns[n] = __ldg(reinterpret_cast<const float2*>(
                args.scales_w + is_up * args.columns + column));
        }
    }

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

    __device__ __forceinline__ void apply(float (&sums)[GEMM_MI][kSums]) const {
#pragma unroll
        for (int i = 0; i < GEMM_MI; ++i) {
#pragma unroll
            for (int n = 0; n < kSums; ++n) {
                const float2 both = of_columns[n / 4];
                sums[i][n] *= of_rows[i][n / 2 % 2] * (n % 2 ? both.y : both.x);
            }
        }
    }
};

}  // namespace
