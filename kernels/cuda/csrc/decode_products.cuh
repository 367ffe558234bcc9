// The multiplying warps of a decode's attention: each takes 16 keys of a tile.
#pragma once

#include "decode_bytes.cuh"
#include "decode_splits.cuh"
#include "decode_sums.cuh"
#include "warp_products.cuh"

namespace {

// How far above the reference weight, as a power of two, later weights may be: far below the
// range of float16.
constexpr float SLACK = 8;
// The reference weight before a key: finite, so that a column that sees none has no NaN.
constexpr float MIN_TOP = -3e38f;

// The maximum over the lanes that hold the same columns of a result.
__device__ __forceinline__ float most_of_column(float x) {
#pragma unroll
    for (int i = 4; i < 32; i *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

__device__ __forceinline__ float sum_of_column(float x) {
#pragma unroll
    for (int i = 4; i < 32; i *= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// The offset of 16 bytes of a token in a tile of keys or values, as the copies swizzle them.
template <int TOKEN_BYTES>
__device__ __forceinline__ u32 place_of(int token, int chunk) {
    // Pieces of 16 bytes of a panel: of 128 bytes, or of the largest power of two that divides
    // a token.
    constexpr u32 CHUNKS = TOKEN_BYTES % 128 == 0 ? 8 : TOKEN_BYTES % 64 == 0 ? 4 : 2;
    const u32 plain = token * TOKEN_BYTES + chunk * 16;
    return plain ^ (plain / 128 % CHUNKS * 16);
}

// Keys are the rows of the first product and head dims those of the second, so that the queries
// of a group, at most 8, fill the columns of both. The groups of several tokens fill COLUMNS one
// behind the other, in products of 8 columns.
//
// With bytes a lane's four adjacent dims of a key are columns lane % 4 * 2, the next, and those
// + 8 of the first product, whose order does not matter. In the second product rows lane / 4
// and that + 8 are adjacent dims, since matrices are transposed by pairs of bytes.
template <bool IS_BF16, int HEAD, int STORED, int COLUMNS>
struct Multiplier : SplitSums<IS_BF16, HEAD, Shape<HEAD, STORED, COLUMNS>> {
    using S = Shape<HEAD, STORED, COLUMNS>;
    using Sums = SplitSums<IS_BF16, HEAD, S>;
    using Sums::a, Sums::memory, Sums::warp, Sums::lane;
    using Sums::columns_of, Sums::finish, Sums::mask_of, Sums::store, Sums::token_of;
    static constexpr int PRODUCTS = COLUMNS / 8;
    static constexpr int STEPS = HEAD / 16;
    static constexpr bool HAS_BYTES = STORED != AS_QUERIES;
    static constexpr bool IN_BF16 = IS_BF16 && !HAS_BYTES;  // the products
    u32 shared;
    Ring<S::STAGES> ring;
    int kv_head;  // of the tile
    u32 turn = 0;  // place of the queries of several tokens

    u32 query[PRODUCTS][STEPS][2];
    // Dims lane / 4 and that + 8 of 16, of the columns lane % 4 * 2 and the next. With bytes
    // dims lane / 4 * 2 and the next.
    float sum[PRODUCTS][STEPS][4];
    float factor[PRODUCTS][2];  // of the scores of these columns, base 2; with bytes
    float top[PRODUCTS][2], total[PRODUCTS][2];  // the total of this lane's keys only
    int token[PRODUCTS][2];  // of these columns, of several
    u64 mask[PRODUCTS][2];   // of these columns' queries, with TREES

    __device__ __forceinline__ char* beside(int row) const {
        const u32 place = S::SHARES ? turn : ring.slot;
        return memory + S::BESIDES + place * S::BESIDE_BYTES + row * HEAD * 2;
    }

    // The first of the two dims of a query's register.
    __device__ __forceinline__ int column_of(int step, int half) const {
        return step * 16 + (HAS_BYTES ? lane % 4 * 4 + half * 2 : half * 8 + lane % 4 * 2);
    }

    // Row `kind` of the scales, for this tile's head.
    __device__ __forceinline__ float head_scale(int kind) const {
        return __ldg(a.kv_scales + kind * a.kv_heads + kv_head);
    }

    __device__ __forceinline__ float2 angles_of(int column, bool are_sines) const {
        const float* angles = reinterpret_cast<const float*>(beside(ANGLE_ROWS));
        return *reinterpret_cast<const float2*>(angles + column + are_sines * HEAD / 2);
    }

    __device__ __forceinline__ void rotate_query() {
#pragma unroll
        for (int step = 0; step < STEPS / 2; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = column_of(step, half);
                rotate<IS_BF16>(query[0][step][half], query[0][step + STEPS / 2][half],
                                angles_of(column, false), angles_of(column, true));
            }
    }

    // Stores the newest token's rotated key and its value into their row of the tile, whose
    // contents are stale, and into the cache.
    __device__ __forceinline__ void place_newest(const Tile& tile, int row) {
        const u32 keys = shared + ring.slot * 2 * S::TILE_BYTES;
        if (lane < HEAD / 4) {
            const int column = lane * 2;
            const u32* own = reinterpret_cast<const u32*>(beside(KEY_ROW) + 2 * column);
            u32 near = own[0], far = own[HEAD / 4];
            rotate<IS_BF16>(near, far, angles_of(column, false), angles_of(column, true));
            const uint2 both = *reinterpret_cast<const uint2*>(beside(VALUE_ROW) + 8 * lane);
            const long long value = tile.newest + a.cache_half_stride;
            if constexpr (HAS_BYTES) {
                const float of_keys = head_scale(2), of_values = head_scale(3);
                put(keys, row, tile.newest, column, narrow<IS_BF16, STORED>(near, of_keys));
                put(keys, row, tile.newest, column + HEAD / 2,
                    narrow<IS_BF16, STORED>(far, of_keys));
                const u32 low = narrow<IS_BF16, STORED>(both.x, of_values);
                const u32 high = narrow<IS_BF16, STORED>(both.y, of_values);
                put(keys + S::TILE_BYTES, row, value, 2 * column, low | high << 16);
            } else {
                put(keys, row, tile.newest, column, near);
                put(keys, row, tile.newest, column + HEAD / 2, far);
                put(keys + S::TILE_BYTES, row, value, 2 * column, both.x);
                put(keys + S::TILE_BYTES, row, value, 2 * column + 2, both.y);
            }
        }
        fence_shared_for_async();
        __syncwarp();
    }

    // The numbers of a row of a tile from a column on, also in the cache at a slot.
    template <typename NUMBERS>
    __device__ __forceinline__ void put(u32 tile, int row, long long slot, int column,
                                        NUMBERS numbers) const {
        const int byte = column * S::SIZE;
        const u32 place = tile + place_of<S::TOKEN_BYTES>(row, byte / 16) + byte % 16;
        if constexpr (sizeof(NUMBERS) == 2) {
            asm volatile("st.shared.b16 [%0], %1;" ::"r"(place), "h"(numbers) : "memory");
        } else {
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(place), "r"(numbers) : "memory");
        }
        *reinterpret_cast<NUMBERS*>(a.cache + slot * S::SIZE + byte) = numbers;
    }

    __device__ __forceinline__ void begin(const Tile& tile) {
        const int columns = columns_of(tile);
#pragma unroll
        for (int product = 0; product < PRODUCTS; ++product) {
            if (product > 0 && columns <= product * 8) break;
            load_query(product, columns);
            if constexpr (!S::SHARES)
                if (a.angles) rotate_query();
            if constexpr (HAS_BYTES) widen_query(product);
#pragma unroll
            for (int i = 0; i < STEPS; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[product][i][j] = 0;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                top[product][i] = MIN_TOP;
                total[product][i] = 0;
                const int column = product * 8 + lane % 4 * 2 + i;
                token[product][i] = token_of(column);
                // Long before the first key that a mask may hide.
                if constexpr (TREES)
                    mask[product][i] = column < columns ? mask_of(tile, column) : ~0ull;
            }
        }
    }

    __device__ __forceinline__ void load_query(int product, int columns) {
        const int row = product * 8 + lane / 4;
        const char* own = beside(row);
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = column_of(step, half);
                query[product][step][half] =
                    row < columns ? *reinterpret_cast<const u32*>(own + 2 * column) : 0;
            }
    }

    // Queries in float16, each times a power of two such that its largest number is 1 to 2.
    __device__ __forceinline__ void widen_query(int product) {
        float most = 0;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 both = unpack<IS_BF16>(query[product][step][half]);
                most = fmaxf(most, fmaxf(fabsf(both.x), fabsf(both.y)));
            }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        constexpr u32 EXPONENTS = 0x7F800000, LEAST = 0x00800000, MOST = 0x7E800000;
        const u32 power = min(max(__float_as_uint(most) & EXPONENTS, LEAST), MOST);
        const float inverse = __uint_as_float(0x7F000000 - power);
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 both = unpack<IS_BF16>(query[product][step][half]);
                query[product][step][half] = pack<false>(both.x * inverse, both.y * inverse);
            }
        const float scale = a.scale_log2 * head_scale(0);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 of_query = __shfl_sync(~0u, power, (lane % 4 * 2 + i) * 4);
            factor[product][i] = scale * __uint_as_float(of_query);
        }
    }

    // Values behind the sequence's end may be anything, including NaN.
    __device__ __forceinline__ void clear_values(u32 values, int valid) {
        constexpr int CHUNKS = S::TOKEN_BYTES / 16;
        for (int i = lane; i < (WARP_KEYS - valid) * CHUNKS; i += 32) {
            const int row = warp * WARP_KEYS + valid + i / CHUNKS;
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                             values + place_of<S::TOKEN_BYTES>(row, i % CHUNKS)),
                         "r"(0)
                         : "memory");
        }
        fence_shared_for_async();
        __syncwarp();
    }

    // Keys lane / 4 and that + 8, of the columns lane % 4 * 2 and the next of LIVE products.
    template <int LIVE>
    __device__ __forceinline__ void score(float (&scores)[LIVE][4], u32 keys) {
        const int row = warp * WARP_KEYS + lane / 8 % 2 * 8 + lane % 8;
        float odd[LIVE][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step += HAS_BYTES ? 2 : 1) {
            u32 matrices[4];
            const int chunk = step * S::SIZE + lane / 16;
            load_matrices<false>(matrices, keys + place_of<S::TOKEN_BYTES>(row, chunk));
            if constexpr (HAS_BYTES) {
                u32 near[4], far[4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    widen<STORED>(matrices[i], near[i], near[i + 2]);
                    widen<STORED>(matrices[i + 2], far[i], far[i + 2]);
                }
#pragma unroll
                for (int p = 0; p < LIVE; ++p) {
                    multiply<IN_BF16>(scores[p], near, query[p][step][0], query[p][step][1]);
                    multiply<IN_BF16>(odd[p], far, query[p][step + 1][0],
                                      query[p][step + 1][1]);
                }
            } else {
#pragma unroll
                for (int p = 0; p < LIVE; ++p)
                    multiply<IN_BF16>(step % 2 ? odd[p] : scores[p], matrices,
                                      query[p][step][0], query[p][step][1]);
            }
        }
#pragma unroll
        for (int p = 0; p < LIVE; ++p)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[p][i] += odd[p][i];
    }

    // The weights of keys 0 to 7 and 8 to 15.
    template <int LIVE>
    __device__ __forceinline__ void add_values(const u32 (&weights)[LIVE][2], u32 values) {
        if constexpr (HAS_BYTES) {
            add_bytes<LIVE>(weights, values);
            return;
        }
        const int row = warp * WARP_KEYS + lane / 16 * 8 + lane % 8;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 matrices[4];
            const int chunk = step * 2 + lane / 8 % 2;
            load_matrices<true>(matrices, values + place_of<S::TOKEN_BYTES>(row, chunk));
#pragma unroll
            for (int p = 0; p < LIVE; ++p)
                multiply<IN_BF16>(sum[p][step], matrices, weights[p][0], weights[p][1]);
        }
    }

    // A lane has two keys' numbers of two adjacent dims.
    template <int LIVE>
    __device__ __forceinline__ void add_bytes(const u32 (&weights)[LIVE][2], u32 values) {
        const int row = warp * WARP_KEYS + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
        for (int step = 0; step < STEPS; step += 2) {
            u32 matrices[4];
            const int chunk = step + lane / 16;
            load_matrices<true>(matrices, values + place_of<S::TOKEN_BYTES>(row, chunk));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32 dims[4];
                widen<STORED>(regrouped(matrices[2 * i]), dims[0], dims[1]);
                widen<STORED>(regrouped(matrices[2 * i + 1]), dims[2], dims[3]);
#pragma unroll
                for (int p = 0; p < LIVE; ++p)
                    multiply<IN_BF16>(sum[p][step + i], dims, weights[p][0], weights[p][1]);
            }
        }
    }

    // Weights are relative to a reference maximum. A slightly larger maximum does not replace
    // it: rescaling all sums takes more instructions than weighing 16 keys. Each column decides
    // for itself, so that its result does not depend on other columns.
    __device__ __forceinline__ void raise(int product, const float (&most)[2]) {
        float decay[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float found = most_of_column(most[i]);
            const float former = top[product][i];
            if (found > former + SLACK) top[product][i] = found;
            decay[i] = exp2_fast(former - top[product][i]);
            total[product][i] *= decay[i];
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[product][i][j] *= decay[j % 2];
    }

    __device__ __forceinline__ float scale_of(int product, int i) const {
        return HAS_BYTES ? factor[product][i] : a.scale_log2;
    }

    // Scores of keys that a column's query does not see, of `valid` keys. The first query sees
    // `seen` of them, and each later one a key more; with TREES those of their masks.
    __device__ __forceinline__ void hide(int product, float (&scores)[4], int valid, int seen) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = lane / 4 + i / 2 * 8;
            const int end = seen + (S::SHARES ? token[product][i % 2] : 0);
            bool is_hidden = key >= (S::SHARES ? min(valid, end) : valid);
            if constexpr (TREES) is_hidden |= is_masked(mask[product][i % 2], end - 1 - key);
            if (is_hidden) scores[i] = minus_infinity();
        }
    }

    // The weights of a product's columns in place of their scores.
    __device__ __forceinline__ void weigh(int product, float (&scores)[4], u32 (&weights)[2]) {
        float most[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            most[i] = fmaxf(scores[i], scores[i + 2]) * scale_of(product, i);
        if (__any_sync(~0u, most[0] > top[product][0] + SLACK ||
                                most[1] > top[product][1] + SLACK))
            raise(product, most);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float scale = scale_of(product, i), reference = top[product][i];
            scores[i] = exp2_fast(scores[i] * scale - reference);
            scores[i + 2] = exp2_fast(scores[i + 2] * scale - reference);
            total[product][i] += scores[i] + scores[i + 2];
        }
        weights[0] = transposed(pack<IN_BF16>(scores[0], scores[1]));
        weights[1] = transposed(pack<IN_BF16>(scores[2], scores[3]));
    }

    // This warp's keys of the tile in the ring's slot, the first `valid` of them.
    template <int LIVE>
    __device__ __forceinline__ void take(int valid, int seen) {
        const u32 keys = shared + ring.slot * 2 * S::TILE_BYTES;
        float scores[LIVE][4] = {};
        u32 weights[LIVE][2];
        score<LIVE>(scores, keys);
#pragma unroll
        for (int p = 0; p < LIVE; ++p) {
            if (seen < WARP_KEYS + (TREES ? TREE_BITS : 0)) hide(p, scores[p], valid, seen);
            weigh(p, scores[p], weights[p]);
        }
        if (valid < WARP_KEYS) clear_values(keys + S::TILE_BYTES, valid);
        add_values<LIVE>(weights, keys + S::TILE_BYTES);
    }

    // Combines the warps' results of a split: the output, or a partial result.
    __device__ void end(const Tile& tile) {
        const int columns = columns_of(tile);
#pragma unroll
        for (int product = 0; product < PRODUCTS; ++product) {
            total[product][0] = sum_of_column(total[product][0]);
            total[product][1] = sum_of_column(total[product][1]);
            for (int first = product * 8; first < min(product * 8 + 8, columns);
                 first += EXCHANGED)
                exchange_columns(tile, product, first, columns);
        }
    }

    __device__ __forceinline__ void exchange_columns(const Tile& tile, int product, int first,
                                                     int columns) {
        float* exchange = reinterpret_cast<float*>(memory + S::EXCHANGE);
        float2* statistics = reinterpret_cast<float2*>(memory + S::STATISTICS);
        named_wait(IS_FREE, CONSUMERS);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int row = product * 8 + lane % 4 * 2 + j - first;
            if (row < 0 || row >= EXCHANGED) continue;
            const int place = warp * EXCHANGED + row;
            constexpr int BETWEEN = HAS_BYTES ? 1 : 8;  // a lane's two dims
            const int dim = lane / 4 * (HAS_BYTES ? 2 : 1);
            float* own = exchange + place * S::EXCHANGE_ROW + dim;
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                own[i * 16] = sum[product][i][j];
                own[i * 16 + BETWEEN] = sum[product][i][j + 2];
            }
            if (lane < 4)
                statistics[place] = make_float2(top[product][j], total[product][j]);
        }
        named_wait(IS_THERE, CONSUMERS);
        const int row = threadIdx.x * 4 / HEAD;
        if (row < EXCHANGED && first + row < columns)
            weigh_warps(tile, first, row, threadIdx.x * 4 % HEAD, exchange, statistics);
    }

    __device__ __forceinline__ void weigh_warps(const Tile& tile, int first, int row,
                                                int column, const float* exchange,
                                                const float2* statistics) {
        float most = minus_infinity(), all = 0;
#pragma unroll
        for (int i = 0; i < CONSUMER_WARPS; ++i)
            most = fmaxf(most, statistics[i * EXCHANGED + row].x);
        float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < CONSUMER_WARPS; ++i) {
            const float2 own = statistics[i * EXCHANGED + row];
            const float weight = own.y > 0 ? exp2_fast(own.x - most) : 0;
            const float4 part = *reinterpret_cast<const float4*>(
                exchange + (i * EXCHANGED + row) * S::EXCHANGE_ROW + column);
            value.x += weight * part.x;
            value.y += weight * part.y;
            value.z += weight * part.z;
            value.w += weight * part.w;
            all += weight * own.y;
        }
        float scale = all > 0 ? 1 / all : 0;
        if constexpr (HAS_BYTES) scale *= head_scale(1);
        value = make_float4(value.x * scale, value.y * scale, value.z * scale, value.w * scale);
        const int token = token_of(first + row);
        const int head = kv_head * a.group + first + row - token * a.group;
        if (tile.count == 1) {
            const int sequence = S::SHARES ? sequence_of(tile, token) : tile.sequence;
            store(sequence, head * HEAD + column, value);
            return;
        }
        const long long heads = static_cast<long long>(a.kv_heads) * a.group;
        const int number = S::SHARES ? tile.partial + token : tile.number;
        const long long pair = number * heads + head;
        *reinterpret_cast<float4*>(a.partial + pair * HEAD + column) = value;
        if (column == 0) a.log_sums[pair] = all > 0 ? most + __log2f(all) : minus_infinity();
    }

    __device__ __forceinline__ void take_keys(const Tile& tile, int valid) {
        const int seen = S::HAS_SEEN ? tile.seen - warp * WARP_KEYS : valid;
        if constexpr (S::SHARES) {
            if (columns_of(tile) > 8) {
                take<PRODUCTS>(valid, seen);
            } else {
                take<1>(valid, seen);
            }
        } else {
            take<1>(valid, seen);
        }
    }

    // Processes all tiles of the ring.
    __device__ void take_all() {
        for (int flags = 0; !(flags & IS_FINAL); ring.next()) {
            barrier_wait(ring.full(), ring.parity);
            const char* place = memory + S::TILES + ring.slot * sizeof(Tile);
            const int4 words = *reinterpret_cast<const int4*>(place);
            const Tile& stored = *reinterpret_cast<const Tile*>(place);
            Tile tile{words.x, words.y, words.z, words.w, stored.first_cut, stored.heads,
                      stored.newest};
            if constexpr (S::HAS_SEEN) {
                const int4 shares = *reinterpret_cast<const int4*>(place + 32);
                tile.queries = shares.x;
                tile.next = shares.y;
                tile.partial = shares.z;
                tile.seen = shares.w;
            }
            const int heads = tile.heads;
            kv_head = heads & 0xFFFF;
            const int rows = words.x & 255, valid = rows - warp * WARP_KEYS;
            flags = words.x;
            if (flags & BEGINS) begin(tile);
            if constexpr (!S::SHARES)
                if ((flags & HAS_NEWEST) && (rows - 1) / WARP_KEYS == warp)
                    place_newest(tile, rows - 1);
            if (valid > 0) take_keys(tile, min(WARP_KEYS, valid));
            if (S::SHARES && (flags & BEGINS)) turn ^= 1;
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.empty());
            if (flags & ENDS) end(tile);
            if (flags & FINISHES) finish(tile.first_cut, tile.number, heads);
        }
    }
};

}  // namespace
