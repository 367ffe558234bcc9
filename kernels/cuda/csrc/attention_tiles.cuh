// The work of attention to prompts: tiles of queries, steps of keys, and the shared memory that
// one warp fills and two warpgroups read.
#pragma once

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
constexpr int GROUP = 8;  // tokens whose keys or values are contiguous, panel by panel
constexpr int GROUP_BYTES = GROUP * PANEL * 2;  // of a panel

// Named barriers; 0 is the block's own.
constexpr int TURN = 1;  // and 2: a warpgroup's turn at the tensor cores
constexpr int OWN = 3;   // and 4: the warps of one warpgroup

// One tile of the plan.
struct Tile {
    int token;        // its first query among the step's tokens
    int num_queries;  // the sequence's in the lower half; in the upper half how many
                      // keys of the sequence follow the tile's last key, at most KEYS
    int position;     // of its first query in the sequence
    int row;          // of the block table
};

struct Arguments {
    void* output;
    const int* tables;
    // The first entry holds the number of the others in `token`, and in its last two fields the
    // next item and the number of finished blocks: both are 0 before and after a launch.
    Tile* tiles;
    long long output_stride;
    long long table_stride;
    float scale_log2;
    int group;
    int kv_heads;
    int block_shift;
    int window;
    int num_sinks;
    // Strides from block to block, from keys to values and from head to head, in pieces of the
    // cache.
    int block_pieces, half_pieces, head_pieces;
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

// The addresses of a ring's barriers, and this thread's position in the ring.
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

// The steps of a tile's loop, from the last to the first; at least one.
struct Steps {
    int last;   // of the keys that the tile's last query sees
    int low;    // of the first key in the window of the first query
    int sinks;  // of the tokens before that, the number that holds sinks

    __device__ __forceinline__ Steps(const Tile& tile, const Arguments& arguments)
        : last((tile.position + (tile.num_queries & 0xFFFF) - 1) / KEYS), low(0), sinks(0) {
        if constexpr (HAS_WINDOW) {
            low = max(tile.position - arguments.window + 1, 0) / KEYS;
            sinks = min((arguments.num_sinks + KEYS - 1) / KEYS, low);
        }
    }

    // The following step; negative behind the last one.
    __device__ __forceinline__ int next(int step) const {
        return (HAS_WINDOW && step == low ? sinks : step) - 1;
    }
};

// Keys of the tile's sequence, or keys that no step reaches.
__device__ __forceinline__ int num_keys(const Tile& tile) {
    return tile.position + (tile.num_queries & 0xFFFF) + (tile.num_queries >> 16);
}

}  // namespace
