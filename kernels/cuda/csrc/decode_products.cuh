// The multiplying warps of a decode's attention: each takes 16 keys of a tile.
#pragma once

#include "decode_bytes.cuh"
#include "decode_splits.cuh"
#include "warp_products.cuh"

namespace {

// How far above the reference weight, as a power of two, later weights may be: far below the
// range of float16.
constexpr float SLACK = 8;

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
    constexpr u32 CHUNKS = TOKEN_BYTES < 128 ? TOKEN_BYTES / 16 : 8;
    const u32 plain = token * TOKEN_BYTES + chunk * 16;
    return plain ^ (plain / 128 % CHUNKS * 16);
}

// Keys are the rows of the first product and head dims those of the second, so that the queries
// of a group, at most 8, fill the columns of both.
//
// With bytes a lane's four adjacent dims of a key are columns lane % 4 * 2, the next, and those
// + 8 of the first product, whose order does not matter. In the second product rows lane / 4
// and that + 8 are adjacent dims, since matrices are transposed by pairs of bytes.
template <bool IS_BF16, int HEAD, int STORED>
struct Multiplier {
    using S = Shape<HEAD, STORED>;
    static constexpr int STEPS = HEAD / 16;
    static constexpr bool HAS_BYTES = STORED != AS_QUERIES;
    static constexpr bool IN_BF16 = IS_BF16 && !HAS_BYTES;  // the products
    const Arguments& a;
    u32 shared;
    char* memory;
    Ring<S::STAGES> ring;
    int warp, lane;
    int kv_head;  // of the tile

    u32 query[STEPS][2];
    // Dims lane / 4 and that + 8 of 16, of the queries lane % 4 * 2 and the next. With bytes
    // dims lane / 4 * 2 and the next.
    float sum[STEPS][4];
    float factor[2];  // of the scores of these queries, base 2; with bytes
    float top[2], total[2];  // of these queries, the total of this lane's keys only

    __device__ __forceinline__ char* beside(int row) const {
        return memory + S::BESIDES + ring.slot * S::BESIDE_BYTES + row * HEAD * 2;
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
                rotate<IS_BF16>(query[step][half], query[step + STEPS / 2][half],
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

    __device__ __forceinline__ void begin() {
        const int row = lane / 4;
        const char* own = beside(row);
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = column_of(step, half);
                query[step][half] =
                    row < a.group ? *reinterpret_cast<const u32*>(own + 2 * column) : 0;
            }
        if (a.angles) rotate_query();
        if constexpr (HAS_BYTES) widen_query();
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i][j] = 0;
        top[0] = top[1] = minus_infinity();
        total[0] = total[1] = 0;
    }

    // Queries in float16, each times a power of two such that its largest number is 1 to 2.
    __device__ __forceinline__ void widen_query() {
        float most = 0;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 both = unpack<IS_BF16>(query[step][half]);
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
                const float2 both = unpack<IS_BF16>(query[step][half]);
                query[step][half] = pack<false>(both.x * inverse, both.y * inverse);
            }
        const float scale = a.scale_log2 * head_scale(0);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 of_query = __shfl_sync(~0u, power, (lane % 4 * 2 + i) * 4);
            factor[i] = scale * __uint_as_float(of_query);
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

    // Keys lane / 4 and that + 8, of the queries lane % 4 * 2 and the next.
    __device__ __forceinline__ void score(float (&scores)[4], u32 keys) {
        const int row = warp * WARP_KEYS + lane / 8 % 2 * 8 + lane % 8;
        float odd[4] = {0, 0, 0, 0};
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
                multiply<IN_BF16>(scores, near, query[step][0], query[step][1]);
                multiply<IN_BF16>(odd, far, query[step + 1][0], query[step + 1][1]);
            } else {
                multiply<IN_BF16>(step % 2 ? odd : scores, matrices, query[step][0],
                                  query[step][1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[i] += odd[i];
    }

    __device__ __forceinline__ void add_values(u32 weights_low, u32 weights_high, u32 values) {
        if constexpr (HAS_BYTES) {
            add_bytes(weights_low, weights_high, values);
            return;
        }
        const int row = warp * WARP_KEYS + lane / 16 * 8 + lane % 8;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 matrices[4];
            const int chunk = step * 2 + lane / 8 % 2;
            load_matrices<true>(matrices, values + place_of<S::TOKEN_BYTES>(row, chunk));
            multiply<IN_BF16>(sum[step], matrices, weights_low, weights_high);
        }
    }

    // A lane has two keys' numbers of two adjacent dims.
    __device__ __forceinline__ void add_bytes(u32 weights_low, u32 weights_high, u32 values) {
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
                multiply<IN_BF16>(sum[step + i], dims, weights_low, weights_high);
            }
        }
    }

    // Weights are relative to a reference maximum. A slightly larger maximum does not replace
    // it: rescaling all sums takes more instructions than weighing 16 keys.
    __device__ __forceinline__ void raise(const float (&most)[2]) {
        float decay[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // The first key is valid, so this is finite.
            const float new_top = fmaxf(top[i], most_of_column(most[i]));
            decay[i] = exp2_fast(top[i] - new_top);
            top[i] = new_top;
            total[i] *= decay[i];
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i][j] *= decay[j % 2];
    }

    __device__ __forceinline__ float scale_of(int query) const {
        return HAS_BYTES ? factor[query] : a.scale_log2;
    }

    // This warp's keys of the tile in the ring's slot, the first `valid` of them.
    __device__ __forceinline__ void take(int valid) {
        const u32 keys = shared + ring.slot * 2 * S::TILE_BYTES;
        float scores[4] = {0, 0, 0, 0};
        score(scores, keys);
        if (valid < WARP_KEYS) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (lane / 4 + i / 2 * 8 >= valid) scores[i] = minus_infinity();
        }
        float most[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) most[i] = fmaxf(scores[i], scores[i + 2]) * scale_of(i);
        if (__any_sync(~0u, most[0] > top[0] + SLACK || most[1] > top[1] + SLACK)) raise(most);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            scores[i] = exp2_fast(scores[i] * scale_of(i) - top[i]);
            scores[i + 2] = exp2_fast(scores[i + 2] * scale_of(i) - top[i]);
            total[i] += scores[i] + scores[i + 2];
        }
        if (valid < WARP_KEYS) clear_values(keys + S::TILE_BYTES, valid);
        add_values(transposed(pack<IN_BF16>(scores[0], scores[1])),
                   transposed(pack<IN_BF16>(scores[2], scores[3])), keys + S::TILE_BYTES);
    }

    // Combines the warps' results of a split: the output, or a partial result.
    __device__ void end(const Tile& tile) {
        total[0] = sum_of_column(total[0]);
        total[1] = sum_of_column(total[1]);
        float* exchange = reinterpret_cast<float*>(memory + S::EXCHANGE);
        float2* statistics = reinterpret_cast<float2*>(memory + S::STATISTICS);
        for (int first = 0; first < a.group; first += EXCHANGED) {
            named_wait(IS_FREE, CONSUMERS);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int row = lane % 4 * 2 + j - first;
                if (row < 0 || row >= EXCHANGED) continue;
                const int place = warp * EXCHANGED + row;
                constexpr int BETWEEN = HAS_BYTES ? 1 : 8;  // a lane's two dims
                const int dim = lane / 4 * (HAS_BYTES ? 2 : 1);
                float* own = exchange + place * S::EXCHANGE_ROW + dim;
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    own[i * 16] = sum[i][j];
                    own[i * 16 + BETWEEN] = sum[i][j + 2];
                }
                if (lane < 4) statistics[place] = make_float2(top[j], total[j]);
            }
            named_wait(IS_THERE, CONSUMERS);
            const int row = threadIdx.x * 4 / HEAD;
            if (row < EXCHANGED && first + row < a.group)
                weigh_warps(tile, first, row, threadIdx.x * 4 % HEAD, exchange, statistics);
        }
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
        const int head = kv_head * a.group + first + row;
        if (tile.count == 1) {
            store(tile.sequence, head * HEAD + column, value);
            return;
        }
        const long long heads = static_cast<long long>(a.kv_heads) * a.group;
        const long long pair = tile.number * heads + head;
        *reinterpret_cast<float4*>(a.partial + pair * HEAD + column) = value;
        if (column == 0) a.log_sums[pair] = all > 0 ? most + __log2f(all) : minus_infinity();
    }

    __device__ __forceinline__ void store(int sequence, int place, float4 value) const {
        char* to = static_cast<char*>(a.output) + 2 * (sequence * a.output_stride + place);
        *reinterpret_cast<uint2*>(to) =
            make_uint2(pack<IS_BF16>(value.x, value.y), pack<IS_BF16>(value.z, value.w));
    }

    // Counts two splits, of these `heads`, as done; the last warp of a sequence combines all of
    // its splits.
    __device__ void finish(int first, int last, int heads) {
        int* flags = reinterpret_cast<int*>(memory + S::FLAGS);
        __threadfence();
        named_wait(IS_FREE, CONSUMERS);
        if (warp < 2 && lane == 0) {
            const int number = warp == 0 ? first : last;
            const Split split = read_split(a.splits + number);
            int is_last = 0;
            if (split.count > 1 && (warp == 0 || first != last)) {
                int* counter = a.counters + split.sequence * a.kv_heads +
                               (warp == 0 ? heads >> 16 : heads & 0xFFFF);
                is_last = atomicAdd(counter, 1) == split.count - 1;
                if (is_last) *counter = 0;
            }
            flags[warp] = is_last;
            __threadfence();
        }
        named_wait(IS_THERE, CONSUMERS);
        for (int i = 0; i < 2; ++i) {
            if (flags[i] == 0) continue;
            const Split split = read_split(a.splits + (i == 0 ? first : last));
            const int head = i == 0 ? heads >> 16 : heads & 0xFFFF;
            for (int row = warp; row < a.group; row += CONSUMER_WARPS)
                weigh_splits(split, head * a.group + row);
        }
    }

    __device__ __forceinline__ void weigh_splits(const Split& split, int head) {
        const int heads = a.kv_heads * a.group;
        const float* log_sums = a.log_sums + static_cast<long long>(split.first) * heads + head;
        float most = minus_infinity();
        for (int i = lane; i < split.count; i += 32)
            most = fmaxf(most, __ldcg(log_sums + static_cast<long long>(i) * heads));
        for (int i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
        // With heads of 64, two lanes share four columns.
        const int column = lane * 4 % HEAD;
        const float* partial =
            a.partial + (static_cast<long long>(split.first) * heads + head) * HEAD + column;
        float4 value = make_float4(0, 0, 0, 0);
        float all = 0;
        for (int base = 0; base < split.count; base += 32) {
            const int number = min(32, split.count - base);
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
        store(split.sequence, head * HEAD + column,
              make_float4(value.x * scale, value.y * scale, value.z * scale, value.w * scale));
    }

    // Processes all tiles of the ring.
    __device__ void take_all() {
        for (int flags = 0; !(flags & IS_FINAL); ring.next()) {
            barrier_wait(ring.full(), ring.parity);
            const char* place = memory + S::TILES + ring.slot * sizeof(Tile);
            const int4 words = *reinterpret_cast<const int4*>(place);
            const int first_cut = reinterpret_cast<const Tile*>(place)->first_cut;
            const int heads = reinterpret_cast<const Tile*>(place)->heads;
            const long long newest = reinterpret_cast<const Tile*>(place)->newest;
            const Tile tile{words.x, words.y, words.z, words.w, first_cut, heads, newest};
            kv_head = heads & 0xFFFF;
            const int rows = words.x & 255, valid = rows - warp * WARP_KEYS;
            flags = words.x;
            if (flags & BEGINS) begin();
            if ((flags & HAS_NEWEST) && (rows - 1) / WARP_KEYS == warp)
                place_newest(tile, rows - 1);
            if (valid > 0) take(min(WARP_KEYS, valid));
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.empty());
            if (flags & ENDS) end(tile);
            if (flags & FINISHES) finish(tile.first_cut, tile.number, heads);
        }
    }
};

}  // namespace
