// The warpgroups that multiply. A thread holds parts of two rows of its warp's 16: element i of
// an accumulator is in row i / 2 % 2 and column i / 4 * 8 + i % 2 of the thread's own.
#pragma once

#include "attention_tiles.cuh"

namespace {

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

template <bool IS_BF16, int HEAD>
struct Consumer {
    using S = Shape<HEAD>;
    Rings<HEAD> rings;
    u32 base;
    int warpgroup, thread;
    float scale_log2;
    float top[2], total[2];
    float out[HEAD / 2];
    u32 weights[KEYS / 4];

    __device__ __forceinline__ Consumer(u32 base, float scale_log2)
        : rings(base),
          base(base),
          warpgroup(threadIdx.x / WARPGROUP - 1),
          thread(threadIdx.x % WARPGROUP),
          scale_log2(scale_log2) {}

    // Starts scores = queries @ keys.T.
    __device__ __forceinline__ void start_scores(float (&scores)[KEYS / 2]) {
        const u32 queries = base + S::QUERIES + rings.queries.slot() * S::TILE_BYTES +
                            warpgroup * (64 * PANEL * 2);
        const u32 keys = base + S::KEY_TILES + rings.keys.slot() * S::TILE_BYTES;
        const u64 a = operand(queries, 0), b = operand(keys, 0, S::PANELS * GROUP_BYTES);
#pragma unroll
        for (int i = 0; i < HEAD / 16; ++i) {
            const int panel = i / 4, column = i % 4 * 2;
            product_nt<IS_BF16>(scores, a + panel * (PANEL_BYTES >> 4) + column,
                                b + panel * (GROUP_BYTES >> 4) + column, i > 0);
        }
        products_commit();
    }

    // Starts out += weights @ values.
    __device__ __forceinline__ void start_output() {
        const u32 values = base + S::VALUES + rings.values.slot() * S::TILE_BYTES;
        const u64 b = operand(values, GROUP_BYTES, S::PANELS * GROUP_BYTES);
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) {
            product_nn<IS_BF16>(out, weights + i * 4, b + i * (16 * HEAD * 2 >> 4));
        }
        products_commit();
    }

    // Scores become exp2(scaled score - running maximum); factor rescales earlier sums.
    __device__ __forceinline__ void soften(float (&scores)[KEYS / 2], float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = top[r];
#pragma unroll
            for (int i = 0; i < KEYS / 2; i += 4) {
                largest = fmaxf(largest, fmaxf(scores[i + 2 * r], scores[i + 2 * r + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float from = largest == minus_infinity() ? 0.0f : largest * scale_log2;
            factor[r] = exp2_fast(top[r] * scale_log2 - from);
            top[r] = largest;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < KEYS / 2; i += 4) {
                float& first = scores[i + 2 * r];
                float& second = scores[i + 2 * r + 1];
                first = exp2_fast(first * scale_log2 - from);
                second = exp2_fast(second * scale_log2 - from);
                sum += first + second;
            }
            total[r] = total[r] * factor[r] + sum;
        }
    }

    __device__ __forceinline__ void keep_weights(const float (&scores)[KEYS / 2]) {
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) {
            weights[i] = pack<IS_BF16>(scores[2 * i], scores[2 * i + 1]);
        }
    }

    // Hides the keys behind each row's position.
    __device__ __forceinline__ void hide(float (&scores)[KEYS / 2], const int (&positions)[2],
                                         int first_key) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int last = positions[r] - first_key - thread % 4 * 2;
#pragma unroll
            for (int i = 0; i < KEYS / 2; i += 4) {
                if (i * 2 > last) scores[i + 2 * r] = minus_infinity();
                if (i * 2 + 1 > last) scores[i + 2 * r + 1] = minus_infinity();
            }
        }
    }

    // Hides the keys in front of each row's window, but for the sinks.
    __device__ __forceinline__ void hide_past(float (&scores)[KEYS / 2],
                                              const int (&positions)[2], int first_key,
                                              const Arguments& arguments) {
        const int own_key = first_key + thread % 4 * 2;
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            const int key = own_key + i / 4 * 8 + i % 2;
            const bool is_past = key <= positions[i / 2 % 2] - arguments.window;
            if (is_past && key >= arguments.num_sinks) scores[i] = minus_infinity();
        }
    }

    // Zeroes rows of the current values where the cache may hold anything, including NaN. Both
    // warpgroups do this; neither waits for the other.
    __device__ __forceinline__ void clear_values(int first, int behind) {
        const u32 values = base + S::VALUES + rings.values.slot() * S::TILE_BYTES;
        rings.values.wait_full();
        constexpr int UNITS = PANEL * 2 / 16;  // of 16 bytes in a row of a panel
        for (int i = thread; i < (behind - first) * UNITS * S::PANELS; i += WARPGROUP) {
            const int row = first + i / (UNITS * S::PANELS), panel = i / UNITS % S::PANELS;
            const u32 at = values + (row / GROUP * S::PANELS + panel) * GROUP_BYTES +
                           row % GROUP * (PANEL * 2) + i % UNITS * 16;
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0)
                         : "memory");
        }
        fence_shared_for_async();
        named_wait(OWN + warpgroup, WARPGROUP);
    }

    // Zeroes the values in front of the first query's window, which no query of the tile sees:
    // their blocks may belong to other sequences.
    __device__ __forceinline__ void clear_past(const Tile& tile, int first_key,
                                               const Arguments& arguments) {
        const int window = tile.position + 1 - arguments.window - first_key;
        const int first = max(arguments.num_sinks - first_key, 0), behind = min(window, KEYS);
        if (first < behind) clear_values(first, behind);
    }

    // One step of the loop behind the first: its scores, and the output of the preceding step.
    template <bool IS_HIDING>
    __device__ __forceinline__ void step(const int (&positions)[2], int first_key,
                                         const Arguments& arguments) {
        float scores[KEYS / 2];
        float factor[2];
        rings.keys.wait_full();
        named_wait(TURN + warpgroup, CONSUMERS * WARPGROUP);
        pin(scores);
        pin(out);
        products_fence();
        start_scores(scores);
        rings.values.wait_full();
        start_output();
        named_pass(TURN + (warpgroup ^ 1), CONSUMERS * WARPGROUP);
        products_wait<1>();
        pin(scores);
        rings.keys.release();
        if (IS_HIDING) hide(scores, positions, first_key);
        if (IS_HIDING && HAS_WINDOW) hide_past(scores, positions, first_key, arguments);
        soften(scores, factor);
        // Sums are never negative, so the branch is never taken. It keeps the assembler from
        // moving sums, and with them exponentials, behind the wait that they should fill.
        asm volatile(
            "{\n.reg .pred no;\nsetp.lt.f32 no, %0, 0f00000000;\n@no st.shared.f32 [%1], %0;"
            "\n}\n" ::"f"(total[0] + total[1]),
            "r"(base)
            : "memory");
        products_wait<0>();
        pin(out);
        rings.values.release();
#pragma unroll
        for (int i = 0; i < HEAD / 2; ++i) out[i] *= factor[i / 2 % 2];
        keep_weights(scores);
    }

    __device__ __forceinline__ void first_step(const Tile& tile, const int (&positions)[2],
                                               int first_key, const Arguments& arguments) {
        float scores[KEYS / 2];
        float factor[2];
        top[0] = top[1] = minus_infinity();
        total[0] = total[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < HEAD / 2; ++i) out[i] = 0.0f;
        rings.keys.wait_full();
        pin(scores);
        products_fence();
        start_scores(scores);
        products_wait<0>();
        pin(scores);
        rings.keys.release();
        hide(scores, positions, first_key);
        if (HAS_WINDOW) hide_past(scores, positions, first_key, arguments);
        soften(scores, factor);
        keep_weights(scores);
        const int end = num_keys(tile) - first_key;
        if (end < KEYS) clear_values(end, KEYS);
        if (HAS_WINDOW) clear_past(tile, first_key, arguments);
    }

    __device__ __forceinline__ void last_output() {
        rings.values.wait_full();
        pin(out);
        products_fence();
        start_output();
        products_wait<0>();
        pin(out);
        rings.values.release();
    }

    // All steps of a tile. Keys that every row sees need no comparisons.
    __device__ __forceinline__ void attend(const Tile& tile, const int (&positions)[2],
                                           const Arguments& arguments) {
        const Steps steps(tile, arguments);
        int first_key = steps.last * KEYS;
        first_step(tile, positions, first_key, arguments);
        if constexpr (HAS_WINDOW) {
            const int last_position = tile.position + (tile.num_queries & 0xFFFF) - 1;
            while ((first_key = steps.next(first_key / KEYS) * KEYS) >= 0) {
                const bool is_past = first_key <= last_position - arguments.window;
                if (is_past || first_key + KEYS - 1 > tile.position) {
                    step<true>(positions, first_key, arguments);
                    clear_past(tile, first_key, arguments);
                } else {
                    step<false>(positions, first_key, arguments);
                }
            }
        } else {
            first_key -= KEYS;
            for (; first_key + KEYS - 1 > tile.position; first_key -= KEYS) {
                step<true>(positions, first_key, arguments);
            }
            for (; first_key >= 0; first_key -= KEYS) {
                step<false>(positions, first_key, arguments);
            }
        }
        last_output();
    }

    // Writes the rows of this warpgroup, through the shared memory of its queries.
    __device__ __forceinline__ void store(const Item& item, const Arguments& arguments) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            total[r] += __shfl_xor_sync(~0u, total[r], 1);
            total[r] += __shfl_xor_sync(~0u, total[r], 2);
            total[r] = total[r] > 0.0f ? 1.0f / total[r] : 0.0f;
        }
        const u32 rows = base + S::QUERIES + rings.queries.slot() * S::TILE_BYTES +
                         warpgroup * (64 * PANEL * 2);
        const int lane = thread % 32;
        const u32 own_row = rows + (thread / 32 * 16 + lane % 16) * (PANEL * 2);
#pragma unroll
        for (int i = 0; i < HEAD / 16; ++i) {
            u32 packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = i * 8 + j * 2;
                packed[j] = pack<IS_BF16>(out[at] * total[j % 2], out[at + 1] * total[j % 2]);
            }
            const int unit = i % 4 * 2 + lane / 16;
            store_matrices(own_row + i / 4 * PANEL_BYTES + ((unit ^ (lane % 8)) << 4),
                           packed[0], packed[1], packed[2], packed[3]);
        }
        named_wait(OWN + warpgroup, WARPGROUP);
        constexpr int UNITS = HEAD / 8;  // of 16 bytes in a row
        const float per_group = 1.0f / static_cast<float>(arguments.group);
        const int num_queries = item.tile.num_queries & 0xFFFF;
#pragma unroll
        for (int i = 0; i < 64 * UNITS / WARPGROUP; ++i) {
            const int row = (thread + i * WARPGROUP) / UNITS, unit = thread % UNITS;
            const int place = warpgroup * 64 + row;
            const int query = static_cast<int>((place + 0.5f) * per_group);
            if (query >= num_queries) break;
            const int head = item.kv_head * arguments.group + place - query * arguments.group;
            uint4 values;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                         : "r"(rows + row * (PANEL * 2) + unit / 8 * PANEL_BYTES +
                               ((unit % 8 ^ row % 8) << 4)));
            char* to = static_cast<char*>(arguments.output) +
                       ((item.tile.token + query) * arguments.output_stride + head * HEAD) * 2;
            *reinterpret_cast<uint4*>(to + unit * 16) = values;
        }
        // A copy writes the next queries here.
        fence_shared_for_async();
        __syncwarp();
    }

    __device__ __forceinline__ void run(const Item* items, const Arguments& arguments) {
        const float per_group = 1.0f / static_cast<float>(arguments.group);
        if (warpgroup == 1) named_pass(TURN, CONSUMERS * WARPGROUP);
        for (;;) {
            rings.queries.wait_full();
            const Item item = items[rings.queries.slot()];
            if (item.kv_head < 0) break;
            int positions[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4 + r * 8;
                positions[r] =
                    item.tile.position + static_cast<int>((row + 0.5f) * per_group);
            }
            attend(item.tile, positions, arguments);
            store(item, arguments);
            rings.queries.release();
        }
    }
};

}  // namespace
