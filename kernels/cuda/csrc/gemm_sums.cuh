// The epilogue of a tile: sums are stored, gated, added to those of other blocks of the
// cluster, or stored as a part.
#pragma once

#include "gemm_tiles.cuh"
#include "results.cuh"

namespace {

#if !GEMM_SPLIT && !GEMM_PARTS
// Two neighbouring results of row `lane / 4 + 8 * half`, of the eight columns `tile`.
__device__ __forceinline__ u32 result(const float (&sums)[kSums], int tile, int half) {
    const int at = 4 * tile + 2 * half;
    if (!kIsGated) return pack<kIsBf16>(sums[at], sums[at + 1]);
    constexpr int kUp = kSums / 2;
    return pack<kIsBf16>(gated(sums[at], sums[(at + kUp) % kSums]),
                gated(sums[at + 1], sums[(at + kUp + 1) % kSums]));
}

__device__ __forceinline__ void store_tile(const Arguments& args, int row_tile,
                                           int column_tile, const float (&sums)[GEMM_MI][kSums]) {
    constexpr int kTiles = kOutColumns / 8;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int columns = args.columns - column_tile * kOutColumns;
#pragma unroll
    for (int part = 0; part < 2 * GEMM_MI; ++part) {
        const int i = part / 2, half = part % 2;
        const int row = row_tile * kRows + (threadIdx.x / 128 * GEMM_MI + i) * 64 + warp * 16 +
                        8 * half + lane / 4;
        const bool is_inside = row < args.rows;
        u32* out = args.out + (static_cast<long long>(row) * args.pitch +
                               column_tile * kOutColumns) / 2;
#pragma unroll
        for (int tile = 0; tile + 4 <= kTiles; tile += 4) {
            u32 v[4] = {result(sums[i], tile, half), result(sums[i], tile + 1, half),
                        result(sums[i], tile + 2, half), result(sums[i], tile + 3, half)};
            transpose_quad(v);
            const int column = 8 * (tile + lane % 4);
            if (is_inside && column < columns) {
                *reinterpret_cast<uint4*>(out + column / 2) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
#pragma unroll
        for (int tile = kTiles / 4 * 4; tile < kTiles; ++tile) {
            const u32 value = result(sums[i], tile, half);
            if (is_inside && 8 * tile < columns) out[4 * tile + lane % 4] = value;
        }
    }
}
#elif GEMM_SPLIT
constexpr int kUp = kIsGated ? 2 : 1;  // sums of the product for a result

// The sums that pass between the parts of a tile: each part adds up a run of column tiles of
// eight. A block holds `rows` rows of the sums for one part; its pitch spreads rows over the
// banks. Own sums lie in front, received sums behind them.
struct Exchange {
    u32 base, arrived;
    int rows, pitch, split, part;

    __device__ Exchange(const Arguments& args, const Place& place, const Ring& ring, int row_tile,
                        u32 arrived)
        : base(ring.tiles), arrived(arrived), split(args.split), part(place.part) {
        const int most = (kOutColumns / 8 + split - 1) / split;
        rows = min(kRows, args.rows - row_tile * kRows);
        pitch = 8 * (kUp * most | 1);
    }
    __device__ int first_tile(int owner) const { return kOutColumns / 8 * owner / split; }
    __device__ u32 block_bytes() const { return 4 * rows * pitch; }
    __device__ u32 made_for(int owner) const { return base + owner * block_bytes(); }
    // The address at `owner` of the sums of part `from`.
    __device__ u32 found(int owner, int from) const {
        if (from == owner) return made_for(owner);
        return base + (split + from - (from > owner)) * block_bytes();
    }
};

__device__ __forceinline__ void write_sums(const Exchange& exchange,
                                           const float (&sums)[GEMM_MI][kSums]) {
    constexpr int kTiles = kOutColumns / 8;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2 * GEMM_MI; ++half) {
        const int i = half / 2;
        const int row = (threadIdx.x / 128 * GEMM_MI + i) * 64 + warp * 16 + 8 * (half % 2) +
                        lane / 4;
        if (row >= exchange.rows) continue;
        // Divisions are expensive: one for each owner, not for each tile.
        int owner = 0, next = exchange.first_tile(1), count = next;
        u32 target = exchange.base + 4 * row * exchange.pitch + 8 * (lane % 4);
        u32 owner_target = target;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile, target += 32) {
            if (tile == next) {
                ++owner;
                next = exchange.first_tile(owner + 1);
                count = next - tile;
                owner_target += exchange.block_bytes();
                target = owner_target;
            }
#pragma unroll
            for (int up = 0; up < kUp; ++up) {
                const float* sum = &sums[i][4 * (tile + up * kTiles) + 2 * (half % 2)];
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target + 32 * up * count),
                             "f"(sum[0]), "f"(sum[1])
                             : "memory");
            }
        }
    }
}

// The sum over the parts, in their order.
__device__ __forceinline__ float4 add_parts(const Exchange& exchange, u32 within) {
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int from = 0; from < exchange.split; ++from) {
        float4 more;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(more.x), "=f"(more.y), "=f"(more.z), "=f"(more.w)
                     : "r"(exchange.found(exchange.part, from) + within)
                     : "memory");
        total.x += more.x;
        total.y += more.y;
        total.z += more.z;
        total.w += more.w;
    }
    return total;
}

// Adds up and stores this part's columns.
__device__ __forceinline__ void store_sums(const Arguments& args, const Exchange& exchange,
                                           const Tile& tile) {
    const int first = exchange.first_tile(exchange.part);
    const int units = 2 * (exchange.first_tile(exchange.part + 1) - first);
    for (int unit = threadIdx.x; unit < exchange.rows * units; unit += kMultipliers) {
        const int row = unit / units, column = unit % units * 4;
        const u32 within = 4 * (row * exchange.pitch + column);
        float4 sum = add_parts(exchange, within);
        if (kIsGated) {
            const float4 up = add_parts(exchange, within + 16 * units);
            sum = make_float4(gated(sum.x, up.x), gated(sum.y, up.y), gated(sum.z, up.z),
                              gated(sum.w, up.w));
        }
        const int out_column = tile.column * kOutColumns + 8 * first + column;
        if (out_column >= args.columns) continue;
        const long long at =
            static_cast<long long>(tile.row * kRows + row) * args.pitch + out_column;
        *reinterpret_cast<uint2*>(args.out + at / 2) =
            make_uint2(pack<kIsBf16>(sum.x, sum.y), pack<kIsBf16>(sum.z, sum.w));
    }
}

// Adds up the parts' sums through shared memory: every block adds some columns.
__device__ __forceinline__ void reduce_tile(const Arguments& args, const Place& place,
                                            const Exchange& exchange,
                                            const float (&sums)[GEMM_MI][kSums],
                                            const Tile& tile) {
    const u32 bytes = exchange.block_bytes();
    if (threadIdx.x == 0) barrier_arrive_expect(exchange.arrived, (args.split - 1) * bytes);
    // The ring has been read: sums may overwrite it.
    named_wait(1, kMultipliers);
    write_sums(exchange, sums);
    fence_shared_for_async();
    named_wait(1, kMultipliers);
    // The other blocks have read their rings too, and can receive sums.
    cluster_sync();
    const int owner = threadIdx.x;
    if (owner < args.split && owner != place.part) {
        const int rank = owner * args.sharing + place.neighbour;
        send_bytes(address_at(exchange.found(owner, place.part), rank),
                   exchange.made_for(owner), bytes, address_at(exchange.arrived, rank));
    }
    __syncwarp();
    barrier_wait(exchange.arrived, 0);
    store_sums(args, exchange, tile);
    // This block's sums have arrived at their owners.
    cluster_sync();
}
#else
// Stores the float32 sums of a part: whole sectors of 32 bytes by four lanes.
__device__ __forceinline__ void store_part(const Arguments& args, const Tile& tile,
                                           const float (&sums)[GEMM_MI][kSums]) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int columns = args.columns - tile.column * kColumns;
#pragma unroll
    for (int half = 0; half < 2 * GEMM_MI; ++half) {
        const int i = half / 2;
        const int row = tile.row * kRows + (threadIdx.x / 128 * GEMM_MI + i) * 64 + warp * 16 +
                        8 * (half % 2) + lane / 4;
        if (row >= args.rows) continue;
        const long long line = static_cast<long long>(tile.part) * args.rows + row;
        float* out = reinterpret_cast<float*>(args.out) + line * args.pitch +
                     tile.column * kColumns + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
            const float* sum = &sums[i][4 * n + 2 * (half % 2)];
            if (8 * n < columns) {
                *reinterpret_cast<float2*>(out + 8 * n) = make_float2(sum[0], sum[1]);
            }
        }
    }
}
#endif

}  // namespace

