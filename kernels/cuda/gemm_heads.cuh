// What becomes of the sums of a query, key and value product: queries and keys are rotated by
// their halves, queries are stored, and keys and values go to their slots of the paged cache.
#pragma once

#include "gemm_tiles.cuh"
#include "results.cuh"

namespace {

constexpr int kHead = 128;
constexpr int kPairs = kHead / 16;  // of eight columns and those half a head further
static_assert(kColumns % kHead == 0, "a tile has whole heads");

__device__ __forceinline__ float2 load_pair(const float* from) {
    float2 pair;
    asm("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "l"(from));
    return pair;
}

// A row of which this thread has sums, two neighbours of each eight columns: whose token it is.
// Tokens and their angles were known before the kernels in front began.
struct TokenRow {
    int row;
    bool is_inside;
    long long place;      // of its first key in the cache
    const float* angles;  // of this thread's columns

    __device__ __forceinline__ void find(const Arguments& args, int row_tile, int part) {
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        const Heads& heads = args.heads;
        row = row_tile * kRows + (threadIdx.x / 128 * GEMM_MI + part / 2) * 64 + warp * 16 +
              8 * (part % 2) + lane / 4;
        is_inside = row < args.rows;
        const int known = is_inside ? row : 0;
        const long long slot = heads.slots[known];
        place = (slot >> heads.block_shift) * heads.strides[0] +
                (slot & ((1 << heads.block_shift) - 1)) * heads.strides[2];
        angles = heads.angles + heads.positions[known] * kHead + 2 * (lane % 4);
    }

    __device__ __forceinline__ u32* head(const Arguments& args, int head) const {
        const Heads& heads = args.heads;
        if (head < heads.queries) {
            return args.out + (static_cast<long long>(row) * args.pitch + head * kHead) / 2;
        }
        const int beyond = head - heads.queries;
        const bool is_value = beyond >= heads.keys;
        const int number = is_value ? beyond - heads.keys : beyond;
        return heads.cache +
               (place + (is_value ? heads.strides[1] : 0) + number * heads.strides[3]) / 2;
    }
};

struct Angles {
    float2 cosines[kPairs], sines[kPairs];

    __device__ __forceinline__ void load(const TokenRow& row) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            cosines[i] = load_pair(row.angles + 8 * i);
            sines[i] = load_pair(row.angles + 8 * i + kHead / 2);
        }
    }
};

// A head of a row, from its sums, of which the first one lies at FIRST_SUM.
template <int FIRST_SUM>
__device__ __forceinline__ void store_head(const float (&sums)[kSums], const Angles& angles,
                                           bool is_rotated, u32* to) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < kPairs; first += 4) {
        u32 near[4], far[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = FIRST_SUM + 4 * (first + i), beyond = at + 4 * kPairs;
            near[i] = pack<kIsBf16>(sums[at], sums[at + 1]);
            far[i] = pack<kIsBf16>(sums[beyond], sums[beyond + 1]);
            if (is_rotated) {
                rotate<kIsBf16>(near[i], far[i], angles.cosines[first + i],
                                angles.sines[first + i]);
            }
        }
        transpose_quad(near);
        transpose_quad(far);
        if (to == nullptr) continue;
        u32* at = to + 4 * (first + lane % 4);
        *reinterpret_cast<uint4*>(at) = make_uint4(near[0], near[1], near[2], near[3]);
        *reinterpret_cast<uint4*>(at + kHead / 4) = make_uint4(far[0], far[1], far[2], far[3]);
    }
}

// The rows of a tile of which a thread has sums. Found before these are made: looking them up
// takes its time.
struct TokenRows {
    TokenRow rows[2 * GEMM_MI];

    __device__ __forceinline__ TokenRows(const Arguments& args, int row_tile) {
#pragma unroll
        for (int part = 0; part < 2 * GEMM_MI; ++part) rows[part].find(args, row_tile, part);
    }

    __device__ __forceinline__ void store(const Arguments& args, int column_tile,
                                          const float (&sums)[GEMM_MI][kSums]) const {
        Angles angles;
        angles.load(rows[0]);
        store_from<0>(args, column_tile, sums, angles);
    }

    // A function for each row: sums stay in registers, which have no numbers at run time.
    template <int PART>
    __device__ __forceinline__ void store_from(const Arguments& args, int column_tile,
                                               const float (&sums)[GEMM_MI][kSums],
                                               const Angles& angles) const {
        Angles next;
        // Those of the next row are on their way meanwhile.
        if constexpr (PART + 1 < 2 * GEMM_MI) next.load(rows[PART + 1]);
        store_heads<PART, 0>(args, column_tile, sums[PART / 2], angles);
        if constexpr (PART + 1 < 2 * GEMM_MI) {
            store_from<PART + 1>(args, column_tile, sums, next);
        }
    }

    template <int PART, int NUMBER>
    __device__ __forceinline__ void store_heads(const Arguments& args, int column_tile,
                                                const float (&sums)[kSums],
                                                const Angles& angles) const {
        constexpr int kHeads = kColumns / kHead;
        const int head = column_tile * kHeads + NUMBER;
        const int num_rotated = args.heads.queries + args.heads.keys;
        const bool is_stored = rows[PART].is_inside && head < num_rotated + args.heads.keys;
        store_head<NUMBER * kHead / 2 + 2 * (PART % 2)>(
            sums, angles, head < num_rotated,
            is_stored ? rows[PART].head(args, head) : nullptr);
        if constexpr (NUMBER + 1 < kHeads) {
            store_heads<PART, NUMBER + 1>(args, column_tile, sums, angles);
        }
    }
};

}  // namespace
