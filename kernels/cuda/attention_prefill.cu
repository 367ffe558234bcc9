// Causal attention of many queries a sequence over a paged cache of keys and values.
//
// The plan is that of FlashAttention 3 (Shah et al., 2024): one warp copies tiles to shared
// memory, two warpgroups multiply; within a warpgroup the scores of the next keys are computed
// while the softmax of these runs, and the two warpgroups take turns at the tensor cores.
//
// A tile is 128 rows: `step` consecutive queries of one sequence times the `group` heads that
// share a key-value head. 128 keys are one step of its loop, from the last to the first.
//
// WINDOW: each query sees `window` keys, its own the last, and `num_sinks` first ones.

#include "hopper.cuh"

namespace {

#ifdef WINDOW
constexpr bool HAS_WINDOW = true;
#else
constexpr bool HAS_WINDOW = false;
#endif
constexpr int ROWS = 128;
constexpr int KEYS = 128;
constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;
constexpr int CONSUMER_WARPS = CONSUMERS * 4;
constexpr int QUERY_SLOTS = 2;
constexpr int PANEL = 64;  // columns of 2 bytes in the 128 bytes that a swizzle covers
constexpr int PANEL_BYTES = ROWS * PANEL * 2;

// Named barriers; 0 is the block's own.
constexpr int TURN = 1;  // and 2: a warpgroup's turn at the tensor cores
constexpr int OWN = 3;   // and 4: the warps of one warpgroup

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

// One tile of the plan.
struct Tile {
    int token;        // its first query among the step's tokens
    int num_queries;  // that are the sequence's, in the lower half; in the upper one how many
                      // keys of the sequence follow the tile's last one, at most KEYS
    int position;     // of its first query in the sequence
    int row;          // of the block table
};

struct Arguments {
    void* output;
    const int* tables;
    // The first holds the number of the others in `token` and in its last two fields the next
    // item and how many blocks are done: both are 0 before and after a launch.
    Tile* tiles;
    long long output_stride;
    long long table_stride;
    float scale_log2;
    int group;
    int kv_heads;
    int block_shift;
    int window;
    int num_sinks;
};

struct Item {
    Tile tile;
    int kv_head;
};

template <int HEAD>
struct Shape {
    static constexpr int PANELS = HEAD / PANEL;
    static constexpr int TILE_BYTES = PANELS * PANEL_BYTES;
    static constexpr int STAGES = HEAD == 64 ? 4 : 2;
    static constexpr int QUERIES = 0;
    static constexpr int VALUES = QUERIES + QUERY_SLOTS * TILE_BYTES;
    static constexpr int KEY_TILES = VALUES + STAGES * TILE_BYTES;
    static constexpr int BARRIERS = KEY_TILES + STAGES * TILE_BYTES;
    static constexpr int ITEMS = BARRIERS + 8 * (2 * QUERY_SLOTS + 4 * STAGES);
};

// The addresses of a ring's barriers and where this thread stands in it.
template <int SLOTS>
struct Ring {
    u32 barriers;
    u32 count = 0;

    __device__ __forceinline__ u32 slot() const { return count % SLOTS; }
    __device__ __forceinline__ u32 full() const { return barriers + slot() * 8; }
    __device__ __forceinline__ u32 empty() const { return barriers + (SLOTS + slot()) * 8; }
    __device__ __forceinline__ u32 parity() const { return count / SLOTS & 1; }
    __device__ __forceinline__ void wait_full() const { barrier_wait(full(), parity()); }
    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(), parity() ^ 1); }
    // A consumer's warp is done with the slot.
    __device__ __forceinline__ void release() {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty());
        ++count;
    }
};

template <int HEAD>
struct Rings {
    using S = Shape<HEAD>;
    Ring<QUERY_SLOTS> queries;
    Ring<S::STAGES> keys, values;

    __device__ __forceinline__ explicit Rings(u32 base)
        : queries{base + S::BARRIERS},
          keys{queries.barriers + 16 * QUERY_SLOTS},
          values{keys.barriers + 16 * S::STAGES} {}

    __device__ void init() const {
        init(queries);
        init(keys);
        init(values);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    template <int SLOTS>
    __device__ void init(Ring<SLOTS> ring) const {
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(ring.barriers + i * 8, 1);
            barrier_init(ring.barriers + (SLOTS + i) * 8, CONSUMER_WARPS);
        }
    }
};

// ---- The warp that copies.

// Copies the tiles of keys or values of one item; lane l the l-th box, of one block and panel.
template <int HEAD>
struct CacheReader {
    using S = Shape<HEAD>;
    const TensorMap* cache;
    const int* table;
    int num_keys, block_shift, lane, kv_head;

    __device__ __forceinline__ int boxes() const { return (KEYS >> block_shift) * S::PANELS; }

    // The block of this lane's box in a step; -1 if there is none.
    __device__ __forceinline__ int block_of(int step) const {
        const int index = step * (KEYS >> block_shift) + lane / S::PANELS;
        const bool is_used = step >= 0 && lane < boxes() && (index << block_shift) < num_keys;
        return is_used ? __ldg(table + index) : -1;
    }

    __device__ __forceinline__ void copy(Ring<S::STAGES>& ring, u32 tiles, int block,
                                         int is_value) {
        ring.wait_empty();
        const int used = __popc(__ballot_sync(~0u, block >= 0));
        const int box_bytes = (PANEL * 2) << block_shift;
        if (lane == 0) barrier_arrive_expect(ring.full(), used * box_bytes);
        __syncwarp();
        if (block >= 0) {
            const int panel = lane % S::PANELS;
            const u32 to = tiles + ring.slot() * S::TILE_BYTES + panel * PANEL_BYTES +
                           lane / S::PANELS * box_bytes;
            copy_box_5d(to, cache, ring.full(), panel * PANEL, 0, kv_head, is_value, block);
        }
        __syncwarp();
        ++ring.count;
    }
};

// The steps of a tile's loop, from the last to the first; there is always one.
struct Steps {
    int last;   // of the keys that the tile's last query sees
    int low;    // of the first key in the window of the first query
    int sinks;  // how many in front of that have sinks

    __device__ __forceinline__ Steps(const Tile& tile, const Arguments& arguments)
        : last((tile.position + (tile.num_queries & 0xFFFF) - 1) / KEYS), low(0), sinks(0) {
        if constexpr (HAS_WINDOW) {
            low = max(tile.position - arguments.window + 1, 0) / KEYS;
            sinks = min((arguments.num_sinks + KEYS - 1) / KEYS, low);
        }
    }

    // The step behind this one; negative behind the last of all.
    __device__ __forceinline__ int next(int step) const {
        return (HAS_WINDOW && step == low ? sinks : step) - 1;
    }
};

// Keys of the tile's sequence, or some that no step reaches.
__device__ __forceinline__ int num_keys(const Tile& tile) {
    return tile.position + (tile.num_queries & 0xFFFF) + (tile.num_queries >> 16);
}

template <int HEAD>
__device__ void produce(u32 base, Item* items, const TensorMap* queries,
                        const TensorMap* cache, const Arguments& arguments) {
    using S = Shape<HEAD>;
    const int lane = threadIdx.x % 32;
    const int num_tiles = arguments.tiles[0].token;
    const int query_bytes = ROWS / arguments.group * arguments.group * HEAD * 2;
    Rings<HEAD> rings(base);
    int item = blockIdx.x;
    while (item < num_tiles * arguments.kv_heads) {
        // One head after another: what runs at a time shares keys and values in the L2 cache.
        const int kv_head = item / num_tiles;
        const Tile tile = arguments.tiles[1 + item - kv_head * num_tiles];
        int next = 0;
        if (lane == 0) next = atomicAdd(&arguments.tiles[0].position, 1) + gridDim.x;
        CacheReader<HEAD> reader{cache, arguments.tables + tile.row * arguments.table_stride,
                                 num_keys(tile), arguments.block_shift, lane, kv_head};
        const Steps steps(tile, arguments);
        int step = steps.last;
        int block = reader.block_of(step);
        rings.queries.wait_empty();
        const u32 slot = rings.queries.slot();
        if (lane == 0) {
            items[slot] = Item{tile, kv_head};
            barrier_arrive_expect(rings.queries.full(), query_bytes);
            for (int panel = 0; panel < S::PANELS; ++panel) {
                copy_box_3d(base + S::QUERIES + slot * S::TILE_BYTES + panel * PANEL_BYTES,
                            queries, rings.queries.full(), panel * PANEL,
                            kv_head * arguments.group, tile.token);
            }
        }
        ++rings.queries.count;
        reader.copy(rings.keys, base + S::KEY_TILES, block, 0);
        while ((step = steps.next(step)) >= 0) {
            const int next_block = reader.block_of(step);
            reader.copy(rings.keys, base + S::KEY_TILES, next_block, 0);
            reader.copy(rings.values, base + S::VALUES, block, 1);
            block = next_block;
        }
        reader.copy(rings.values, base + S::VALUES, block, 1);
        item = __shfl_sync(~0u, next, 0);
    }
    rings.queries.wait_empty();
    if (lane == 0) {
        items[rings.queries.slot()].kv_head = -1;
        barrier_arrive(rings.queries.full());
        // The last block leaves the counters as the next launch needs them.
        __threadfence();
        if (atomicAdd(&arguments.tiles[0].row, 1) == static_cast<int>(gridDim.x) - 1) {
            arguments.tiles[0].position = 0;
            arguments.tiles[0].row = 0;
        }
    }
}

// ---- The warpgroups that multiply. A thread holds parts of two rows of its warp's 16: element
// i of an accumulator is in row i / 2 % 2 and column i / 4 * 8 + i % 2 of the thread's own.

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
        const u64 a = operand(queries, 0), b = operand(keys, 0);
#pragma unroll
        for (int i = 0; i < HEAD / 16; ++i) {
            const int at = i / 4 * (PANEL_BYTES >> 4) + i % 4 * 2;
            product_nt<IS_BF16>(scores, a + at, b + at, i > 0);
        }
        products_commit();
    }

    // Starts out += weights @ values.
    __device__ __forceinline__ void start_output() {
        const u32 values = base + S::VALUES + rings.values.slot() * S::TILE_BYTES;
        const u64 b = operand(values, PANEL_BYTES);
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) {
            product_nn<IS_BF16>(out, weights + i * 4, b + i * (16 * PANEL * 2 >> 4));
        }
        products_commit();
    }

    // Scores become exp2(scaled score - largest so far); factor is what earlier ones shrink by.
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

    // Zeroes the rows of the current values from `first` on, where the cache holds anything at
    // all, NaN too. Both warpgroups do; neither waits for the other.
    __device__ __forceinline__ void clear_values(int first) {
        const u32 values = base + S::VALUES + rings.values.slot() * S::TILE_BYTES;
        rings.values.wait_full();
        for (int panel = 0; panel < S::PANELS; ++panel) {
            const u32 end = values + (panel + 1) * PANEL_BYTES;
            u32 at = values + panel * PANEL_BYTES + first * (PANEL * 2) + thread * 16;
            for (; at < end; at += WARPGROUP * 16) {
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0)
                             : "memory");
            }
        }
        fence_shared_for_async();
        named_wait(OWN + warpgroup, WARPGROUP);
    }

    // One step of the loop behind the first: its scores, and the output of the step before.
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
        // Sums are never negative, and nothing is stored. But the assembler moves no sum, and
        // so no exponential, behind the wait that they are to fill.
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
        if (end < KEYS) clear_values(end);
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
        // The next queries come here by a copy.
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

template <bool IS_BF16, int HEAD>
__device__ __forceinline__ void prefill(const TensorMap* queries, const TensorMap* cache,
                                        const Arguments& arguments) {
    using S = Shape<HEAD>;
    extern __shared__ unsigned char memory[];
    // Swizzles and barriers of copies want tiles at multiples of 1,024 bytes.
    const u32 start = shared_address(memory);
    const u32 base = (start + 1023) & ~1023u;
    Item* items = reinterpret_cast<Item*>(memory + (base - start) + S::ITEMS);
    if (threadIdx.x == 0) {
        prefetch_map(queries);
        prefetch_map(cache);
        Rings<HEAD>(base).init();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        give_registers<24>();
        if (threadIdx.x < 32) produce<HEAD>(base, items, queries, cache, arguments);
    } else {
        take_registers<240>();
        Consumer<IS_BF16, HEAD>(base, arguments.scale_log2).run(items, arguments);
    }
}

}  // namespace

#define PREFILL(NAME, IS_BF16, HEAD)                                                      \
    extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)          \
        NAME(const __grid_constant__ TensorMap queries,                                   \
             const __grid_constant__ TensorMap cache,                                     \
             const __grid_constant__ Arguments arguments) {                               \
        prefill<IS_BF16, HEAD>(&queries, &cache, arguments);                              \
    }

PREFILL(prefill_bfloat16_128, true, 128)
PREFILL(prefill_bfloat16_64, true, 64)
PREFILL(prefill_float16_128, false, 128)
PREFILL(prefill_float16_64, false, 64)

// ---- The plan of a step, made once for all layers.

namespace {

constexpr int PLANNERS = 1024;

struct PlanArguments {
    const int* query_start_loc;
    const int* seq_lens;
    const int* rows;  // or null: sequence s has row s
    Tile* tiles;
    int num_sequences;
    int step;
};

__device__ __forceinline__ int bin_of(int position, int num_queries) {
    // The longest tiles first, so that short ones fill the end of the launch.
    return max(PLANNERS - (position + num_queries + KEYS - 1) / KEYS, 0);
}

}  // namespace

// One block: lists the tiles of all sequences, sorted by the number of keys.
extern "C" __global__ void __launch_bounds__(PLANNERS)
    plan_prefill(const __grid_constant__ PlanArguments plan) {
    __shared__ int places[PLANNERS];
    __shared__ int sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    places[threadIdx.x] = 0;
    __syncthreads();
    for (int pass = 0; pass < 2; ++pass) {
        for (int s = warp; s < plan.num_sequences; s += 32) {
            const int first = plan.query_start_loc[s];
            const int count = plan.query_start_loc[s + 1] - first;
            const int past = plan.seq_lens[s] - count;
            const int row = plan.rows == nullptr ? s : plan.rows[s];
            for (int at = lane * plan.step; at < count; at += 32 * plan.step) {
                const int num_queries = min(plan.step, count - at);
                const int place = atomicAdd(places + bin_of(past + at, num_queries), 1);
                const int behind = min(count - at - num_queries, KEYS);
                if (pass == 0) continue;
                plan.tiles[1 + place] =
                    Tile{first + at, num_queries | behind << 16, past + at, row};
            }
        }
        __syncthreads();
        if (pass == 1) return;
        const int own = places[threadIdx.x];
        int sum = own;
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) sums[warp] = sum;
        __syncthreads();
        for (int w = 0; w < warp; ++w) sum += sums[w];
        places[threadIdx.x] = sum - own;
        if (threadIdx.x == PLANNERS - 1) plan.tiles[0] = Tile{sum, 0, 0, 0};
        __syncthreads();
    }
}
