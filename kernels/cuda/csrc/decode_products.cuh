// The multiplying warps of a decode's attention: each takes 16 keys of a tile.
#pragma once

#include "decode_splits.cuh"

namespace {

// How far above the reference weight, as a power of two, later weights may be: far below the
// range of float16.
constexpr float SLACK = 8;

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

// sum [16, 8] += a [16, 16] @ b [16, 8] by a warp.
template <bool IS_BF16>
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#define WARP_PRODUCT(TYPE)                                                                \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                   \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"   \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (IS_BF16) {
        WARP_PRODUCT("bf16");
    } else {
        WARP_PRODUCT("f16");
    }
#undef WARP_PRODUCT
}

// The transpose of an 8x8 matrix of 2 bytes in a warp's registers.
__device__ __forceinline__ u32 transposed(u32 matrix) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
}

template <bool IS_BF16>
__device__ __forceinline__ float2 unpack(u32 pair) {
    if constexpr (IS_BF16) {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000));
    } else {
        float2 both;
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
            "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
            : "=f"(both.x), "=f"(both.y)
            : "r"(pair));
        return both;
    }
}

// Two pairs of numbers that are half a head apart, rotated, in the order of operations of the
// kernel that rotates prompts: a token's key is the same whichever kernel made it.
template <bool IS_BF16>
__device__ __forceinline__ void rotate(u32& near, u32& far, float2 cosine, float2 sine) {
    const float2 left = unpack<IS_BF16>(near), right = unpack<IS_BF16>(far);
    near = pack<IS_BF16>(__fmaf_rn(left.x, cosine.x, -__fmul_rn(right.x, sine.x)),
                         __fmaf_rn(left.y, cosine.y, -__fmul_rn(right.y, sine.y)));
    far = pack<IS_BF16>(__fmaf_rn(right.x, cosine.x, __fmul_rn(left.x, sine.x)),
                        __fmaf_rn(right.y, cosine.y, __fmul_rn(left.y, sine.y)));
}

// Over the lanes that hold the same columns of a result.
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

// The offset of 16 bytes of a token in a tile of keys or values.
template <int HEAD>
__device__ __forceinline__ u32 place_of(int token, int chunk) {
    const int row = token * Shape<HEAD>::PANELS + chunk / 8;
    return row * ROW_BYTES + ((chunk % 8) ^ (row % 8)) * 16;
}

// Keys are the rows of the first product and head dims those of the second, so that the queries
// of a group, at most 8, fill the columns of both.
template <bool IS_BF16, int HEAD>
struct Multiplier {
    using S = Shape<HEAD>;
    static constexpr int STEPS = HEAD / 16;
    const Arguments& a;
    u32 shared;
    char* memory;
    Ring<S::STAGES> ring;
    int warp, lane;
    int kv_head;  // of the tile

    u32 query[STEPS][2];
    // Dims lane / 4 and that + 8 of 16, of the queries lane % 4 * 2 and the next.
    float sum[STEPS][4];
    float top[2], total[2];  // of these queries, the total of this lane's keys only

    __device__ __forceinline__ char* beside(int row) const {
        return memory + S::BESIDES + ring.slot * S::BESIDE_BYTES + row * HEAD * 2;
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
                const int column = step * 16 + half * 8 + lane % 4 * 2;
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
            char* key = a.cache + 2 * tile.newest + 2 * column;
            const u32* own = reinterpret_cast<const u32*>(beside(KEY_ROW) + 2 * column);
            u32 near = own[0], far = own[HEAD / 4];
            rotate<IS_BF16>(near, far, angles_of(column, false), angles_of(column, true));
            *reinterpret_cast<u32*>(key) = near;
            *reinterpret_cast<u32*>(key + HEAD) = far;
            put(keys, row, 2 * column, near);
            put(keys, row, 2 * column + HEAD, far);
            const uint2 both = *reinterpret_cast<const uint2*>(beside(VALUE_ROW) + 8 * lane);
            char* value = a.cache + 2 * (tile.newest + a.cache_half_stride) + 8 * lane;
            *reinterpret_cast<uint2*>(value) = both;
            put(keys + S::TILE_BYTES, row, 8 * lane, both.x);
            put(keys + S::TILE_BYTES, row, 8 * lane + 4, both.y);
        }
        fence_shared_for_async();
        __syncwarp();
    }

    __device__ __forceinline__ void put(u32 tile, int row, int byte, u32 word) const {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(tile + place_of<HEAD>(row, byte / 16) +
                                                     byte % 16),
                     "r"(word)
                     : "memory");
    }

    __device__ __forceinline__ void begin() {
        const int row = lane / 4;
        const char* own = beside(row);
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = step * 16 + half * 8 + lane % 4 * 2;
                query[step][half] =
                    row < a.group ? *reinterpret_cast<const u32*>(own + 2 * column) : 0;
            }
        if (a.angles) rotate_query();
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i][j] = 0;
        top[0] = top[1] = minus_infinity();
        total[0] = total[1] = 0;
    }

    // Values behind the sequence's end may be anything, including NaN.
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

    // Keys lane / 4 and that + 8, of the queries lane % 4 * 2 and the next.
    __device__ __forceinline__ void score(float (&scores)[4], u32 keys) {
        const int row = warp * WARP_KEYS + lane / 8 % 2 * 8 + lane % 8;
        float odd[4] = {0, 0, 0, 0};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 matrices[4];
            load_matrices<false>(matrices, keys + place_of<HEAD>(row, step * 2 + lane / 16));
            multiply<IS_BF16>(step % 2 ? odd : scores, matrices, query[step][0],
                              query[step][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[i] += odd[i];
    }

    __device__ __forceinline__ void add_values(u32 weights_low, u32 weights_high, u32 values) {
        const int row = warp * WARP_KEYS + lane / 16 * 8 + lane % 8;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 matrices[4];
            load_matrices<true>(matrices,
                                values + place_of<HEAD>(row, step * 2 + lane / 8 % 2));
            multiply<IS_BF16>(sum[step], matrices, weights_low, weights_high);
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
        for (int i = 0; i < 2; ++i) most[i] = fmaxf(scores[i], scores[i + 2]) * a.scale_log2;
        if (__any_sync(~0u, most[0] > top[0] + SLACK || most[1] > top[1] + SLACK)) raise(most);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            scores[i] = exp2_fast(scores[i] * a.scale_log2 - top[i]);
            scores[i + 2] = exp2_fast(scores[i + 2] * a.scale_log2 - top[i]);
            total[i] += scores[i] + scores[i + 2];
        }
        if (valid < WARP_KEYS) clear_values(keys + S::TILE_BYTES, valid);
        add_values(transposed(pack<IS_BF16>(scores[0], scores[1])),
                   transposed(pack<IS_BF16>(scores[2], scores[3])), keys + S::TILE_BYTES);
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
                float* own = exchange + place * S::EXCHANGE_ROW + lane / 4;
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    own[i * 16] = sum[i][j];
                    own[i * 16 + 8] = sum[i][j + 2];
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
        const float scale = all > 0 ? 1 / all : 0;
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
