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
    // With GEMM_FP8: the scale of each output, or with GEMM_GROUPS [experts, scale_rows, inner_steps]
    // of blocks of outputs and 128 inputs, and the row of each output in these; the scale of each row
    // of x, or with GEMM_GROUPS [rows, inner_steps] of each 128 inputs.
    const float* scales_w;
    const int* scale_row_of;
    const float* scales_x;
    int scale_rows;
};

#include "expert_runs.cuh"
