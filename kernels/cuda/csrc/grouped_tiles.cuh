// The work of the blocks of grouped_gemm.cu, and the sizes of their tiles.
#pragma once

#include "tile_ring.cuh"

namespace {

constexpr int kWeights = 64 * GROUPED_MI * GROUPED_WARPGROUPS;
constexpr int kMostRows = 16 * GEMM_CHUNKS;
constexpr int kTileW = kWeights * kRowBytes;
constexpr int kTileX = kMostRows * kRowBytes;
constexpr int kStageBytes = kTileW + kTileX;
constexpr int kMultipliers = 128 * GROUPED_WARPGROUPS;
// Registers a thread: the copying warpgroup gives most of its registers to the multiplying
// ones.
constexpr int kCopyRegisters = 40;
constexpr int kMultiplyRegisters = 232;
constexpr int kOutColumns = kIsGated ? kWeights / 2 : kWeights;

using Ring = TileRing<kStageBytes, kTileW, 0>;

}  // namespace

struct Arguments {
    u32* out;           // [rows, columns], two values a word
    const int* totals;  // rows of each expert; x holds the experts' rows in order
    int experts;
    int columns;        // of out, a multiple of 8
    int column_tiles;   // of an expert's matrix
    int inner_steps;    // the inner dimension in steps of 64, rounded up
    int sharing;        // blocks of a cluster, which share weights and take a run of rows each
    u64 hint_w;         // cache policy of weights
};

namespace {

// The ends of each expert's rows and groups of work. A group is a tile of weights and as many
// runs of rows as a cluster has blocks.
struct Plan {
    int row_end[GROUPED_EXPERTS];
    int group_end[GROUPED_EXPERTS];
};

__device__ __forceinline__ int group_runs(const Arguments& args, int rows) {
    const int most = kMostRows * args.sharing;
    return (rows + most - 1) / most;
}

// Computed by one warp; the others wait.
__device__ __forceinline__ void make_plan(const Arguments& args, Plan& plan) {
    const int lane = threadIdx.x % 32;
    int rows = 0, groups = 0;
    for (int first = 0; first < args.experts; first += 32) {
        const int expert = first + lane;
        int row_end = expert < args.experts ? args.totals[expert] : 0;
        int group_end = group_runs(args, row_end) * args.column_tiles;
#pragma unroll
        for (int far = 1; far < 32; far *= 2) {
            const int more_rows = __shfl_up_sync(0xffffffffu, row_end, far);
            const int more_groups = __shfl_up_sync(0xffffffffu, group_end, far);
            if (lane >= far) {
                row_end += more_rows;
                group_end += more_groups;
            }
        }
        if (expert < args.experts) {
            plan.row_end[expert] = rows + row_end;
            plan.group_end[expert] = groups + group_end;
        }
        rows += __shfl_sync(0xffffffffu, row_end, 31);
        groups += __shfl_sync(0xffffffffu, group_end, 31);
    }
}

// A block's work in a group: a tile of an expert's weights, and a run of its rows, which may be
// empty. An expert's runs are equally long, so that little of a tile is padding. Runs are
// processed in bands that stay in the cache while all weights pass; within a band, concurrent
// clusters have the same weights.
struct Work {
    int expert, column, first_row, rows, chunks;

    __device__ Work(const Arguments& args, const Plan& plan, int group, int neighbour) {
        constexpr int kBand = 8;
        int last = args.experts - 1;
        expert = 0;
        while (expert < last) {
            const int middle = (expert + last) / 2;
            if (plan.group_end[middle] > group) {
                last = middle;
            } else {
                expert = middle + 1;
            }
        }
        const int row_start = expert ? plan.row_end[expert - 1] : 0;
        const int count = plan.row_end[expert] - row_start;
        const int within = group - (expert ? plan.group_end[expert - 1] : 0);
        const int pairs = group_runs(args, count);
        const int band = within / (kBand * args.column_tiles);
        const int height = min(kBand, pairs - band * kBand);
        const int at = within - band * kBand * args.column_tiles;
        const int run = (band * kBand + at % height) * args.sharing + neighbour;
        column = at / height;
        const int runs = pairs * args.sharing;
        const int length = ((count + runs - 1) / runs + 15) / 16 * 16;
        const int start = min(run * length, count);
        rows = min(length, count - start);
        first_row = row_start + start;
        chunks = max((rows + 15) / 16, 1);
    }
};

__device__ __forceinline__ int num_groups(const Arguments& args, const Plan& plan) {
    return plan.group_end[args.experts - 1];
}

}  // namespace
