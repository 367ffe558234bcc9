// The warps of a decode's attention that multiply: each takes 16 keys of a tile.
#pragma once

#include "decode_pieces.cuh"

namespace {

// Four 8x8 matrices of 2 bytes to a warp's registers; lane l names row l % 8 of matrix l / 8.
template <bool IS_TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
    if constexpr (IS_TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
    }
}

// sum [16, 8] += a [16, 16] @ b [16, 8] by a warp. The lower 8 rows of `a` are zero.
template <bool IS_BF16>
__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
#define WARP_PRODUCT(TYPE)                                                                \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                   \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %2, %3};"   \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                 \
                 : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1))
    if constexpr (IS_BF16) {
        WARP_PRODUCT("bf16");
    } else {
        WARP_PRODUCT("f16");
    }
#undef WARP_PRODUCT
}

// Where 16 bytes of a token lie in a tile of keys or values.
template <int HEAD>
__device__ __forceinline__ u32 place_of(int token, int chunk) {
    const int row = token * Shape<HEAD>::PANELS + chunk / 8;
    return row * ROW_BYTES + ((chunk % 8) ^ (row % 8)) * 16;
}

template <bool IS_BF16, int HEAD>
struct Multiplier {
    using S = Shape<HEAD>;
    static constexpr int STEPS = HEAD / 16;
    const Arguments& a;
    u32 shared;
    char* memory;
    Ring<S::STAGES> ring;
    int kv_head, warp, lane;

    u32 query[STEPS][2];
    float sum[2 * STEPS][4];
    float top, total;  // of this lane's row, the total of this lane's columns only

    __device__ __forceinline__ void begin(const Piece& piece) {
        const int row = lane / 4;
        const char* head = static_cast<const char*>(a.query) +
                           2 * (piece.sequence * a.query_stride +
                                static_cast<long long>(kv_head * a.group + row) * HEAD);
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = step * 16 + half * 8 + lane % 4 * 2;
                query[step][half] =
                    row < a.group ? *reinterpret_cast<const u32*>(head + 2 * column) : 0;
            }
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i][j] = 0;
        top = minus_infinity();
        total = 0;
    }

    // Values behind the sequence's end may be anything, also what is not a number.
    __device__ __forceinline__ void clear_values(u32 values, int valid) {
        constexpr int CHUNKS = 2 * HEAD / 16;
        for (int i = lane; i < (WARP_KEYS - valid) * CHUNKS; i += 32) {
            const int row = warp * WARP_KEYS + valid + i / CHUNKS;
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                             values + place_of<HEAD>(row, i % CHUNKS)),
                         "r"(0)
                         : "memory");
        }
        fence_shared_for_async();
        __syncwarp();
    }

    __device__ __forceinline__ void score(float (&low)[4], float (&high)[4], u32 keys) {
        const int row = warp * WARP_KEYS + lane / 16 * 8 + lane % 8;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int chunk = step * 2 + lane / 8 % 2;
            u32 matrices[4];
            load_matrices<false>(matrices, keys + place_of<HEAD>(row, chunk));
            multiply<IS_BF16>(low, query[step][0], query[step][1], matrices[0], matrices[1]);
            multiply<IS_BF16>(high, query[step][0], query[step][1], matrices[2], matrices[3]);
        }
    }

    __device__ __forceinline__ void add_values(u32 weights_low, u32 weights_high, u32 values) {
        const int row = warp * WARP_KEYS + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int chunk = step * 2 + lane / 16;
            u32 matrices[4];
            load_matrices<true>(matrices, values + place_of<HEAD>(row, chunk));
            multiply<IS_BF16>(sum[2 * step], weights_low, weights_high, matrices[0],
                              matrices[1]);
            multiply<IS_BF16>(sum[2 * step + 1], weights_low, weights_high, matrices[2],
                              matrices[3]);
        }
    }

    // This warp's keys of the tile in the ring's slot, the first `valid` of them.
    __device__ __forceinline__ void take(int valid) {
        const u32 keys = shared + ring.slot * 2 * S::TILE_BYTES;
        float low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
        score(low, high, keys);
        const int column = lane % 4 * 2;
        float scores[4] = {low[0], low[1], high[0], high[1]};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (column + i % 2 + i / 2 * 8 >= valid) scores[i] = minus_infinity();
        float most = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        // The first key is valid, so this is finite.
        const float new_top = fmaxf(top, most * a.scale_log2);
        const float decay = exp2_fast(top - new_top);
        top = new_top;
        total *= decay;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scores[i] = exp2_fast(scores[i] * a.scale_log2 - new_top);
            total += scores[i];
        }
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) {
            sum[i][0] *= decay;
            sum[i][1] *= decay;
        }
        if (valid < WARP_KEYS) clear_values(keys + S::TILE_BYTES, valid);
        add_values(pack<IS_BF16>(scores[0], scores[1]), pack<IS_BF16>(scores[2], scores[3]),
                   keys + S::TILE_BYTES);
    }

    // What the warps have of a piece, weighed: the output, or a partial result.
    __device__ void end(const Piece& piece, int number) {
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        float* exchange = reinterpret_cast<float*>(memory + S::EXCHANGE);
        float2* statistics = reinterpret_cast<float2*>(memory + S::STATISTICS);
        named_wait(IS_FREE, CONSUMERS);
        const int row = lane / 4;
        if (row < a.group) {
            float* own = exchange + (warp * MAX_GROUP + row) * HEAD + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 2 * STEPS; ++i)
                *reinterpret_cast<float2*>(own + i * 8) = make_float2(sum[i][0], sum[i][1]);
            if (lane % 4 == 0) statistics[warp * MAX_GROUP + row] = make_float2(top, total);
        }
        named_wait(IS_THERE, CONSUMERS);
        for (int at = threadIdx.x * 4; at < a.group * HEAD; at += CONSUMERS * 4)
            weigh_warps(piece, number, at / HEAD, at % HEAD, exchange, statistics);
    }

    __device__ __forceinline__ void weigh_warps(const Piece& piece, int number, int row,
                                                int column, const float* exchange,
                                                const float2* statistics) {
        float most = minus_infinity(), all = 0;
        for (int i = 0; i < CONSUMER_WARPS; ++i)
            most = fmaxf(most, statistics[i * MAX_GROUP + row].x);
        float4 value = make_float4(0, 0, 0, 0);
        for (int i = 0; i < CONSUMER_WARPS; ++i) {
            const float2 own = statistics[i * MAX_GROUP + row];
            const float weight = own.y > 0 ? exp2_fast(own.x - most) : 0;
            const float4 part = *reinterpret_cast<const float4*>(
                exchange + (i * MAX_GROUP + row) * HEAD + column);
            value.x += weight * part.x;
            value.y += weight * part.y;
            value.z += weight * part.z;
            value.w += weight * part.w;
            all += weight * own.y;
        }
        const float scale = all > 0 ? 1 / all : 0;
        value = make_float4(value.x * scale, value.y * scale, value.z * scale, value.w * scale);
        const int head = kv_head * a.group + row;
        if (piece.count == 1) {
            store(piece.sequence, head * HEAD + column, value);
            return;
        }
        const long long pair = static_cast<long long>(number) * a.kv_heads * a.group + head;
        *reinterpret_cast<float4*>(a.partial + pair * HEAD + column) = value;
        if (column == 0) a.log_sums[pair] = all > 0 ? most + __log2f(all) : minus_infinity();
    }

    __device__ __forceinline__ void store(int sequence, int place, float4 value) const {
        char* to = static_cast<char*>(a.output) + 2 * (sequence * a.output_stride + place);
        *reinterpret_cast<uint2*>(to) =
            make_uint2(pack<IS_BF16>(value.x, value.y), pack<IS_BF16>(value.z, value.w));
    }

    // Counts two pieces as done; whoever is the last of a sequence weighs all of its pieces.
    __device__ void finish(int first, int last) {
        int* flags = reinterpret_cast<int*>(memory + S::FLAGS);
        __threadfence();
        named_wait(IS_FREE, CONSUMERS);
        if (warp < 2 && lane == 0) {
            const int number = warp == 0 ? first : last;
            const Piece piece = read_piece(a.pieces + number);
            int is_last = 0;
            if (piece.count > 1 && (warp == 0 || first != last)) {
                int* counter = a.counters + piece.sequence * a.kv_heads + kv_head;
                is_last = atomicAdd(counter, 1) == piece.count - 1;
                if (is_last) *counter = 0;
            }
            flags[warp] = is_last;
            __threadfence();
        }
        named_wait(IS_THERE, CONSUMERS);
        for (int i = 0; i < 2; ++i) {
            if (flags[i] == 0) continue;
            const Piece piece = read_piece(a.pieces + (i == 0 ? first : last));
            for (int row = warp; row < a.group; row += CONSUMER_WARPS)
                weigh_pieces(piece, kv_head * a.group + row);
        }
    }

    __device__ __forceinline__ void weigh_pieces(const Piece& piece, int head) {
        const int heads = a.kv_heads * a.group;
        const float* log_sums = a.log_sums + static_cast<long long>(piece.first) * heads + head;
        float most = minus_infinity();
        for (int i = lane; i < piece.count; i += 32)
            most = fmaxf(most, __ldcg(log_sums + static_cast<long long>(i) * heads));
        for (int i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
        // With heads of 64, a lane's four columns are another's too.
        const int column = lane * 4 % HEAD;
        const float* partial =
            a.partial + (static_cast<long long>(piece.first) * heads + head) * HEAD + column;
        float4 value = make_float4(0, 0, 0, 0);
        float all = 0;
        for (int base = 0; base < piece.count; base += 32) {
            const int number = min(32, piece.count - base);
            float own = 0;
            if (lane < number)
                own = exp2_fast(__ldcg(log_sums + static_cast<long long>(base + lane) * heads) -
                                most);
#pragma unroll 16
            for (int i = 0; i < number; ++i) {
                const float weight = __shfl_sync(~0u, own, i);
                const float4 part = __ldcg(reinterpret_cast<const float4*>(
                    partial + static_cast<long long>(base + i) * heads * HEAD));
                value.x += weight * part.x;
                value.y += weight * part.y;
                value.z += weight * part.z;
                value.w += weight * part.w;
                all += weight;
            }
        }
        const float scale = 1 / all;
        store(piece.sequence, head * HEAD + column,
              make_float4(value.x * scale, value.y * scale, value.z * scale, value.w * scale));
    }

    __device__ void take_share(int first, int end_of_share) {
        bool is_cut = false;
        for (int number = first; number < end_of_share; ++number) {
            const Piece piece = read_piece(a.pieces + number);
            is_cut |= piece.count > 1;
            begin(piece);
            const int tiles = tiles_of(piece);
            for (int tile = 0; tile < tiles; ++tile) {
                const int key = piece.start + tile * KEYS + warp * WARP_KEYS;
                barrier_wait(ring.full(), ring.parity);
                if (key < piece.end) take(min(WARP_KEYS, piece.end - key));
                __syncwarp();
                if (lane == 0) barrier_arrive(ring.empty());
                ring.next();
            }
            end(piece, number);
        }
        // Only the first and the last sequence of a share can have pieces elsewhere.
        if (is_cut) finish(first, end_of_share - 1);
    }
};

}  // namespace
