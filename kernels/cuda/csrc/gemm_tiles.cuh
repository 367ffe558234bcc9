// The work of the blocks of gemm.cu, and the sizes of their tiles.
#pragma once

#include "quantized_rows.cuh"
#include "tile_ring.cuh"

namespace {

constexpr int kColumns = 16 * GEMM_CHUNKS;
constexpr int kRows = 64 * GEMM_MI * GEMM_WARPGROUPS;
constexpr int kTileX = kRows * kRowBytes;
constexpr int kTileW = kColumns * kRowBytes;
constexpr int kStageBytes = kTileX + kTileW;
constexpr int kSums = kColumns / 2;
constexpr int kMultipliers = 128 * GEMM_WARPGROUPS;
// Registers a thread: the copying warpgroup gives most of its registers to the multiplying
// ones. Not with few sums: a block that takes half of the register file leaves room for the
// next kernel's.
constexpr bool kMovesRegisters = GEMM_WARPGROUPS > 1 && GEMM_MI * kSums > 64;
constexpr int kCopyRegisters = GEMM_WARPGROUPS == 2 ? 40 : 32;
constexpr int kMultiplyRegisters = GEMM_WARPGROUPS == 2 ? 232 : 160;
constexpr bool kSharesWeights = GEMM_SHARES_WEIGHTS;
constexpr int kOutColumns = kIsGated ? kColumns / 2 : kColumns;

using Ring = TileRing<kStageBytes, 0, kTileX>;

}  // namespace

struct Arguments {
    u32* out;        // [rows, pitch], two values a word; or float32 parts
    int rows;        // of x
    int columns;     // of out
    int pitch;       // of rows of out: columns, rounded up to a multiple of 8
    int inner_steps; // the inner dimension in steps of 128 bytes, rounded up
    int row_groups;  // row tiles, or groups of `sharing` of them that share weights
    int groups;      // of tiles for a cluster: row groups x those of columns (x parts)
    int split;       // blocks of a cluster, or parts, that share the inner dimension
    int sharing;     // blocks of a cluster that share rows of x, or of w
    int slice;  // rows of x that a block copies; rows beyond them are not read
    int slice_w;  // rows of w that a block copies if these are shared
    int max_early;  // tiles of weights in flight before the rows of x are ready
    u64 hint_w;      // cache policy of weights
    // With GEMM_FP8: the scale of each row of x, with GEMM_GROUPS [groups, scale_pitch] of each
    // 128 values of a row, and the scale of each row of w.
    const float *scales_x, *scales_w;
    int scale_pitch;  // a multiple of 4
};

namespace {

// The position of a block in its cluster, and of the cluster among all.
struct Place {
    int part, neighbour, cluster, num_clusters;

    __device__ explicit Place(const Arguments& args) {
        const int size = args.sharing * (GEMM_PARTS ? 1 : args.split);
        const int rank = size > 1 ? static_cast<int>(cluster_rank()) : 0;
        part = rank / args.sharing;
        neighbour = rank % args.sharing;
        cluster = blockIdx.x / size;
        num_clusters = gridDim.x / size;
    }
};

// The tile of a group for a block, and its part of the inner dimension. Rows are processed in
// bands that stay in the cache while all weights pass; within a band, concurrent blocks have
// the same weights.
struct Tile {
    int row, column, part, first_step, num_steps;

    __device__ Tile(const Arguments& args, const Place& place, int group) {
        constexpr int kBand = 8;
        int num_groups = args.groups;
        part = place.part;
        if (GEMM_PARTS) {
            part = group % args.split;
            group /= args.split;
            num_groups /= args.split;
        }
        first_step = args.inner_steps * part / args.split;
        num_steps = args.inner_steps * (part + 1) / args.split - first_step;
        const int column_groups = num_groups / args.row_groups;
        const int band = group / (kBand * column_groups);
        const int height = min(kBand, args.row_groups - band * kBand);
        const int at = group - band * kBand * column_groups;
        row = band * kBand + at % height;
        column = at / height;
        int& shared = kSharesWeights ? row : column;
        shared = shared * args.sharing + place.neighbour;
    }
};

// The blocks of its cluster that a block shares work with, itself included.
__device__ __forceinline__ unsigned short peers_of(const Arguments& args, const Place& place) {
    const u32 peers = ((1u << args.sharing) - 1) << (place.part * args.sharing);
    return static_cast<unsigned short>(peers);
}

}  // namespace
