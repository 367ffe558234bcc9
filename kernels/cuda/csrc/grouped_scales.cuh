// The scales of a run's sums in a grouped product of FP8.
#pragma once

#include "grouped_tiles.cuh"

namespace {

// A thread has two outputs of each 64, which are a gate and its up with GEMM_GATED, for two
// neighbours of each eight rows of x.
template <int CHUNKS>
struct Scales {
    const float* of_outputs[GROUPED_MI][2];
    const float* of_rows;
    int count;                     // of the run's rows from this thread's first one on
    float outputs[GROUPED_MI][2];  // of this step, or of all
    float rows[2 * CHUNKS][2];

    __device__ __forceinline__ Scales(const Arguments& args, const Work& work) {
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        const int height = args.columns * (kIsGated ? 2 : 1);
#pragma unroll
        for (int i = 0; i < GROUPED_MI; ++i) {
            const int unit = (threadIdx.x / 128 * GROUPED_MI + i) * 4 + warp;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int eight = kIsGated ? unit : 2 * unit + half;
                // Outputs beyond the last one are not stored.
                const int column = min(work.column * kOutColumns + 8 * eight + lane / 4, args.columns - 1);
                const int output = column + (kIsGated && half ? args.columns : 0);
#ifdef GEMM_GROUPS
                const long long row = static_cast<long long>(work.expert) * args.scale_rows +
                                      args.scale_row_of[output];
                of_outputs[i][half] = args.scales_w + row * args.inner_steps;
#else
                const long long at = static_cast<long long>(work.expert) * height + output;
                outputs[i][half] = __ldg(args.scales_w + at);
#endif
            }
        }
        const int first = 2 * (lane % 4);
        count = work.rows - first;
        of_rows = args.scales_x + static_cast<long long>(work.first_row + first) * row_pitch(args);
#ifndef GEMM_GROUPS
        load_rows(args, 0);
#endif
    }

    static __device__ __forceinline__ int row_pitch(const Arguments& args) {
#ifdef GEMM_GROUPS
        return args.inner_steps;
#else
        return 1;
#endif
    }

    // Rows behind the run's last one are not stored, and may lie behind the last scale.
    __device__ __forceinline__ void load_rows(const Arguments& args, int step) {
        const int pitch = row_pitch(args);
#pragma unroll
        for (int eight = 0; eight < 2 * CHUNKS; ++eight) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int row = 8 * eight + n;
                rows[eight][n] = row < count ? __ldcg(of_rows + row * pitch + step) : 0.0f;
            }
        }
    }

#ifdef GEMM_GROUPS
    __device__ __forceinline__ void load_step(const Arguments& args, int step) {
#pragma unroll
        for (int i = 0; i < GROUPED_MI; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                outputs[i][half] = __ldg(of_outputs[i][half] + step);
            }
        }
        load_rows(args, step);
    }

    // The sums of a step.
    template <int SUMS>
    __device__ __forceinline__ void add(int i, const float (&more)[8 * CHUNKS],
                                        float (&sums)[SUMS]) const {
#pragma unroll
        for (int n = 0; n < 8 * CHUNKS; ++n) {
            sums[n] = fmaf(more[n], outputs[i][n / 2 % 2] * rows[n / 4][n % 2], sums[n]);
        }
    }
#else
    template <int SUMS>
    __device__ __forceinline__ void apply(float (&sums)[GROUPED_MI][SUMS]) const {
#pragma unroll
        for (int i = 0; i < GROUPED_MI; ++i) {
#pragma unroll
            for (int n = 0; n < 8 * CHUNKS; ++n) {
                sums[i][n] *= outputs[i][n / 2 % 2] * rows[n / 4][n % 2];
            }
        }
    }
#endif
};

}  // namespace
