// The work of the blocks of a grouped product: runs of the rows of each expert, by tiles of its
// weights.
//
// Defined before: GROUPED_EXPERTS, at least the number of experts, and kMostRows, the rows of a
// run. ARGS has `totals`, `experts`, `column_tiles` and `sharing`; see grouped_tiles.cuh.
#pragma once

#include "hopper.cuh"

namespace {

// The ends of each expert's rows and groups of work. A group is a tile of weights and as many
// runs of rows as a cluster has blocks.
struct Plan {
    int row_end[GROUPED_EXPERTS];
    int group_end[GROUPED_EXPERTS];
};

// Not from the first-level cache, whose line may be older than the preceding kernels.
__device__ __forceinline__ int load_total(const int* total) {
    int value;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(total) : "memory");
    return value;
}

template <class ARGS>
__device__ __forceinline__ int group_runs(const ARGS& args, int rows) {
    const int most = kMostRows * args.sharing;
    return (rows + most - 1) / most;
}

// Computed by one warp; the others wait.
template <class ARGS>
__device__ __forceinline__ void make_plan(const ARGS& args, Plan& plan) {
    constexpr int kTurns = (GROUPED_EXPERTS + 31) / 32;
    const int lane = threadIdx.x % 32;
    int totals[kTurns];  // of the experts of each turn: all loads wait together
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int expert = 32 * turn + lane;
        totals[turn] = expert < args.experts ? load_total(args.totals + expert) : 0;
    }
    int rows = 0, groups = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        if (32 * turn >= args.experts) break;
        const int expert = 32 * turn + lane;
        int row_end = totals[turn];
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

// The expert of a group, by bisection.
template <class ARGS>
__device__ __forceinline__ int expert_of(const ARGS& args, const Plan& plan, int group) {
    int expert = 0, last = args.experts - 1;
    while (expert < last) {
        const int middle = (expert + last) / 2;
        if (plan.group_end[middle] > group) {
            last = middle;
        } else {
            expert = middle + 1;
        }
    }
    return expert;
}

// The rows of an expert's run: runs are equally long, so that little of a tile is padding.
__device__ __forceinline__ int run_length(int count, int runs) {
    return ((count + runs - 1) / runs + 15) / 16 * 16;
}

// A block's work in a group: a tile of an expert's weights, and a run of its rows, which may be
// empty. Runs are processed in bands that stay in the cache while all weights pass; within a band,
// concurrent clusters have the same weights.
struct Work {
    int expert, column, first_row, rows, chunks;
    bool is_only;  // the only run of its expert and tile

    template <class ARGS>
    __device__ Work(const ARGS& args, const Plan& plan, int group, int neighbour) {
        constexpr int kBand = 8;
        expert = expert_of(args, plan, group);
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
        const int length = run_length(count, runs);
        const int start = min(run * length, count);
        rows = min(length, count - start);
        first_row = row_start + start;
        chunks = max((rows + 15) / 16, 1);
        is_only = runs == 1;
    }
};

template <class ARGS>
__device__ __forceinline__ int num_groups(const ARGS& args, const Plan& plan) {
    return plan.group_end[args.experts - 1];
}

}  // namespace
