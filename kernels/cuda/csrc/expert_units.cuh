// What the grouped products by integer weights share: arguments, the ring of stages, and results.
//
// Defined before: kMostRows, the rows of a run; kBlockUnits, the units of a block. INT_FP4: units of
// fp4_units.cuh. GEMM_FLOAT16: x is float16 instead of bfloat16. GEMM_GATED: each warp's 16 outputs
// of a unit are 8 gates and their 8 ups, and out = silu(gate) * up. Others: integer_units.cuh.
#pragma once

#include "results.cuh"
#include "scaled_units.cuh"
#if INT_FP4
#include "fp4_units.cuh"
#endif

namespace {

constexpr int kThreads = 128 * INT_TILES;  // that multiply
constexpr int kPanelBytes = kMostRows * kRowBytes;
constexpr int kPanels = kUnitInputs / kInner;
constexpr int kTokenBytes = kPanels * kPanelBytes;
constexpr int kStageBytes = (kTokenBytes + kBlockUnits * kUnitBytes + 1023) / 1024 * 1024;
constexpr int kMostStages = 16;
constexpr int kSums = kMostRows / 2;
constexpr int kNarrow = 8, kWide = 32;  // rows of a copy
constexpr int kTileColumns = kIsGated ? kUnitOutputs / 2 : kUnitOutputs;  // of out

#if INT_FP4
using ExpertUnit = Fp4Unit;
constexpr float kFactor = kFp4Divisor;
#else
using ExpertUnit = ScaledUnit;
constexpr float kFactor = kDivisor;
#endif

}  // namespace

struct Arguments {
    const unsigned char* units;  // [experts, tiles of 64 outputs, inner steps, kUnitBytes]
    u32* out;                    // [rows, columns], two values a word
    const unsigned short* bias;  // [experts, outputs of the product], of x's type, or null
    const int* totals;           // rows of each expert; x holds the experts' rows in order
    int experts;
    int columns;       // of out, a multiple of 8
    int column_tiles;  // blocks of tiles of an expert's matrix
    int sharing;       // 1: runs of rows have a block each
    int inner_steps;   // units of a tile
    int unit_tiles;    // tiles of 64 outputs
    int stages;
    int is_early;  // whether totals are known before the preceding kernel ends
    float alpha;   // of SwiGLU with biases: gate * sigmoid(alpha * gate) * (up + 1)
    float limit;
};

#include "expert_runs.cuh"
#include "unit_ring.cuh"

namespace {

// The columns of an instruction for a run: the fewest that suffice.
__device__ __forceinline__ int columns_of(int rows) {
    if (rows <= 8) return 8;
    if (rows <= 16) return 16;
    if (rows <= 32) return 32;
    return rows <= 64 ? 64 : rows <= 96 ? 96 : 128;
}

// `count` units into a stage; unit_at(i) is the first byte of the i-th.
template <class UNIT_AT>
__device__ __forceinline__ void fill_units(const UnitRing& ring, int count, UNIT_AT unit_at,
                                           u64 policy) {
    barrier_wait(ring.released(), ring.parity ^ 1);
    barrier_arrive_expect(ring.filled(), count * kUnitBytes);
#pragma unroll
    for (int i = 0; i < kBlockUnits; ++i) {
        if (i < count) copy_bytes(ring.unit(i), unit_at(i), kUnitBytes, ring.filled(), policy);
    }
}

// The bytes of a tile.
__device__ __forceinline__ u64 tile_bytes(const Arguments& args) {
    return static_cast<u64>(args.inner_steps) * kUnitBytes;
}

__device__ __forceinline__ const unsigned char* units_of(const Arguments& args, int expert,
                                                         int tile) {
    return args.units + (static_cast<u64>(expert) * args.unit_tiles + tile) * tile_bytes(args);
}

// The tensor maps of x: boxes of a few rows, and of many.
struct RowMaps {
    const TensorMap *narrow, *wide;
};

// Inputs of a step into a stage, for as many rows as an instruction has columns: row_at(row) is
// where x has the row-th and those behind it that are copied with it.
template <class ROW_AT>
__device__ __forceinline__ void fill_rows(const UnitRing& ring, const RowMaps& maps, int columns,
                                          int step, ROW_AT row_at) {
    const bool is_wide = columns >= kWide;
    const TensorMap* map = is_wide ? maps.wide : maps.narrow;
    barrier_wait(ring.released(), ring.parity ^ 1);
    barrier_arrive_expect(ring.filled(), columns * kPanels * kRowBytes);
    for (int row = 0; row < columns; row += is_wide ? kWide : kNarrow) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            copy_box_2d(ring.x() + panel * kPanelBytes + row * kRowBytes, map, ring.filled(),
                        step * kUnitInputs + panel * kInner, row_at(row), kReadByAll);
        }
    }
}

// ---- Results.

// Whether a column of out exists: the last unit may have fewer.
__device__ __forceinline__ bool is_column(const Arguments& args, int column) {
    return column < args.columns;
}

// The first column of this warp's results in a half of a tile.
__device__ __forceinline__ int first_column(int tile, int half) {
    constexpr int kHalves = kIsGated ? 1 : 2;
    const int warp = threadIdx.x % 128 / 32;
    return tile * kTileColumns + (warp * kHalves + half) * 8;
}

// The biases of this lane's two sums of each row: of a gate and an up, or of two columns.
struct Biases {
    unsigned short bits[2] = {};

    __device__ __forceinline__ void load(const Arguments& args, int expert, int tile) {
        if (!args.bias) return;
        const u64 outputs = static_cast<u64>(args.columns) * (kIsGated ? 2 : 1);
        const unsigned short* own = args.bias + expert * outputs + threadIdx.x % 32 / 4;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int column = first_column(tile, kIsGated ? 0 : n);
            if (!is_column(args, column)) return;
            bits[n] = own[column + (kIsGated ? n * args.columns : 0)];
        }
    }

    __device__ __forceinline__ float of(int n) const { return first_of_pair(bits[n]); }
};

// SwiGLU; with biases that of gpt-oss, which clamps gates and ups, and keeps NaN.
__device__ __forceinline__ float gated_with(const Arguments& args, float gate, float up) {
    if (!args.bias) return gated(gate, up);
    constexpr float kLog2E = 1.44269504f;
    gate = gate > args.limit ? args.limit : gate;
    up = up > args.limit ? args.limit : up < -args.limit ? -args.limit : up;
    return gate * reciprocal_fast(1.0f + exp2_fast(-kLog2E * args.alpha * gate)) * (up + 1.0f);
}

// Results of two neighbouring rows, in 8 columns, of the eight rows `eight`: lane l has those of
// column l / 4.
__device__ __forceinline__ u32 result(const Arguments& args, const float (&sums)[kSums], int eight,
                                      int half, const float (&bias)[2]) {
    float v[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float* own = sums + 4 * eight + n;
        v[n] = kIsGated ? gated_with(args, fmaf(own[0], kFactor, bias[0]),
                                     fmaf(own[2], kFactor, bias[1]))
                        : fmaf(own[2 * half], kFactor, bias[0]);
    }
    return pack<kIsBf16>(v[0], v[1]);
}

// Stores a run's results in 8 columns: 4 bytes of a row by each lane, or 16 of many rows.
template <int CHUNKS, class WORK>
__device__ __forceinline__ void store_columns(const Arguments& args, const WORK& work, int column,
                                              int half, const float (&bias)[2],
                                              const float (&sums)[kSums]) {
    constexpr int kEights = CHUNKS ? 2 * CHUNKS : 1;
    const int lane = threadIdx.x % 32;
    if constexpr (kEights < 4) {
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
            const u32 pair = transpose_matrix(result(args, sums, eight, half, bias));
            const int row = 8 * eight + lane / 4;
            const u64 at = static_cast<u64>(work.first_row + row) * args.columns + column;
            if (row < work.rows) args.out[at / 2 + lane % 4] = pair;
        }
    } else {
#pragma unroll
        for (int eight = 0; eight < kEights; eight += 4) {
            u32 v[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                v[n] = transpose_matrix(result(args, sums, eight + n, half, bias));
            }
            transpose_quad(v);
            const int row = 8 * (eight + lane % 4) + lane / 4;
            const u64 at = static_cast<u64>(work.first_row + row) * args.columns + column;
            if (row < work.rows) {
                *reinterpret_cast<uint4*>(args.out + at / 2) =
                    make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    }
}

// Stores the results of a tile of 64 outputs of a run, a `Work` or a part of one.
template <int CHUNKS, class WORK>
__device__ __forceinline__ void store_tile(const Arguments& args, const WORK& work, int tile,
                                           const Biases& biases, const float (&sums)[kSums]) {
    constexpr int kHalves = kIsGated ? 1 : 2;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        const int column = first_column(tile, half);
        if (!is_column(args, column)) return;
        const float bias[2] = {biases.of(half), biases.of(1)};
        store_columns<CHUNKS>(args, work, column, half, bias, sums);
    }
}

// The barriers and the ring of a block; `arrivals`: of warps that release a stage. One thread.
__device__ __forceinline__ void init_ring(const UnitRing& ring, int arrivals) {
    for (int n = 0; n < ring.stages; ++n) {
        barrier_init(ring.full + 8 * n, 2);
        barrier_init(ring.empty + 8 * n, arrivals);
    }
    fence_barriers();
}

}  // namespace
