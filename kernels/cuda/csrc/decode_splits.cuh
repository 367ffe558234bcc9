// Shared by the warps of a decode's attention: splits of sequences, and a ring of tiles.
#pragma once

#include "quantized_rows.cuh"

namespace {

constexpr int KEYS = 64;
constexpr int WARP_KEYS = 16;
constexpr int CONSUMER_WARPS = 4;
constexpr int CONSUMERS = 32 * CONSUMER_WARPS;
constexpr int MAX_GROUP = 8;
constexpr int EXCHANGED = 4;  // queries of a group that warps weigh at once
constexpr int FEW = 8;  // tokens of the smaller box
// Tiles of bytes are half as large, so that more rows of queries lie beside them.
constexpr int STAGE_BYTES_OF_ALL = 98304, STAGE_BYTES_OF_BYTES = 81920;
// Bytes in flight within a long split while all thread blocks read: more would only lengthen
// the memory queue, and with it every wait. Short splits use the whole ring, so that their ends
// cause no stall.
constexpr int STAGE_BYTES_OF_FEW = 65536;
constexpr int LONG_TILES = 10;
constexpr int PAGE_SHIFT = 21;  // stripes of a page that change the partition
constexpr bool TREES = DECODE_TREES;
constexpr int TREE_BITS = 64;  // keys that the mask of a query covers

// Named barriers; 0 is the block's own.
constexpr int IS_FREE = 1;   // what the warps exchange has been read
constexpr int IS_THERE = 2;  // it has been written

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

// A sequence may have several queries, each of which sees a key more than the query before.
struct Split {
    int sequence;    // of the first query
    int row;         // of the block table
    int start, end;  // its keys
    int first;  // split of the sequence
    int count;  // of splits of the sequence
    int length;      // keys that the first query sees
    int queries;
    int next;     // sequence of the second query; later queries follow it
    int partial;  // of the first query's partial results of this split
    int known;    // keys that were complete before the step
};

struct Arguments {
    void* output;
    const void* query;
    const int* tables;
    // The numbers of items and of splits, each item's first split, the number of splits.
    const int* items;
    const int4* splits;  // [splits, 2]: the first seven numbers of a split
    int* counters;  // [S, K]: splits done; zero before and after a launch
    float* partial;  // [queries of splits, N, H]
    float* log_sums;  // [queries of splits, N]: base 2
    long long query_stride, output_stride, table_stride;
    float scale_log2;
    int group, kv_heads, block_shift;
    // Whether items, splits, tables and all keys but those of the step were complete before the
    // preceding kernel began.
    int reads_ahead;
    int halves_per_block;
    // [positions, HEAD], cosines and then sines; or null if queries and keys are already
    // rotated, and all keys are in the cache. With angles, queries are followed by the tokens'
    // keys and then their values, and groups have at most 4 queries.
    const float* angles;
    char* cache;
    long long cache_block_stride, cache_half_stride, cache_token_stride, cache_head_stride;
    // [4, K]: scales of keys and of values, then their inverses; null unless the cache has one
    // byte a number.
    const float* kv_scales;
    // `l2_partitions.L2Partitions` of the cache; no pages if any block may read any head.
    const u32* page_partitions;
    // For each partition the number of thread blocks that read it, zero before a launch.
    int* readers;
    long long first_page;
    int num_pages;
    u32 partition_mask;
    u32 processor_partitions[8];
    // [splits]: queries, the second query's sequence, the first partial result of the sequence's
    // first split, and keys complete before the step; read if columns are for several queries.
    const int4* shares;
    // With scales of its own, each query's head of 128 is a group of e4m3 in the output.
    Quantization quantization;
    // [sequences]: `AttentionMetadata.tree_masks`; read with TREES.
    const u64* tree_masks;
};

// The copying warp's descriptor of a tile in the ring.
struct alignas(16) Tile {
    int rows_and_flags;  // of keys, in the lowest byte
    int sequence;
    int number, count;  // of the split, and of splits of the sequence
    int first_cut;  // with FINISHES: the other split of this block that may be cut
    int heads;  // key-value heads of the split, and of that other split above 16 bits
    long long newest;  // with HAS_NEWEST: the slot of the last row's key in the cache
    // Fields of a split for several queries, and keys of the tile, or behind the tile, that the
    // first query may see.
    int queries, next, partial, seen;
};

constexpr int BEGINS = 256;  // a split
constexpr int ENDS = 512;  // a split
constexpr int FINISHES = 1024;  // cut splits have ended
constexpr int IS_FINAL = 2048;  // this is the last tile
constexpr int HAS_NEWEST = 4096;  // the last row is not in the cache yet

// Rows of HEAD numbers beside a tile: the queries of a split that begins there, the key and
// value of a token that is not in the cache yet, and the cosines and sines of either.
constexpr int KEY_ROW = 4, VALUE_ROW = 5, ANGLE_ROWS = 6;

// Numbers of a cache as they are stored.
constexpr int AS_QUERIES = 0, FP8 = 1, INT8 = 2;

constexpr int size_of(int stored) { return stored == AS_QUERIES ? 2 : 1; }

// COLUMNS are query heads: those of one token, at most `MAX_GROUP`, or of several tokens.
template <int HEAD, int STORED, int COLUMNS_>
struct Shape {
    static constexpr int COLUMNS = COLUMNS_;
    static constexpr bool SHARES = COLUMNS > MAX_GROUP;
    static constexpr bool HAS_SEEN = SHARES || TREES;  // tiles tell their keys that are seen
    static constexpr int SIZE = size_of(STORED);
    static constexpr int TOKEN_BYTES = HEAD * SIZE;
    static constexpr int TILE_BYTES = KEYS * TOKEN_BYTES;
    static constexpr int BYTES = SIZE == 1 ? STAGE_BYTES_OF_BYTES : STAGE_BYTES_OF_ALL;
    static constexpr int STAGES = BYTES / (2 * TILE_BYTES);
    static constexpr int FEW_STAGES = STAGE_BYTES_OF_FEW / (2 * TILE_BYTES);
    static constexpr int BESIDE_BYTES = COLUMNS * HEAD * 2;  // of a tile
    // Queries of several tokens have places of their own, taken by splits in turn: beside each
    // tile there is no room.
    static constexpr int BESIDE_PLACES = SHARES ? 2 : STAGES;
    static constexpr int BESIDES = BYTES;
    static constexpr int EXCHANGE = BESIDES + BESIDE_PLACES * BESIDE_BYTES;
    static constexpr int EXCHANGE_ROW = HEAD + 4;  // so that rows begin in different banks
    static constexpr int STATISTICS = EXCHANGE + CONSUMER_WARPS * EXCHANGED * EXCHANGE_ROW * 4;
    static constexpr int TILES = STATISTICS + CONSUMER_WARPS * EXCHANGED * 8;
    static constexpr int BARRIERS = TILES + STAGES * static_cast<int>(sizeof(Tile));
    static constexpr int FLAGS = BARRIERS + 16 * STAGES;
};

// The addresses of the ring's barriers, and this thread's position in the ring.
template <int STAGES>
struct Ring {
    u32 barriers;
    u32 slot = 0, parity = 0;

    __device__ __forceinline__ u32 full() const { return barriers + slot * 8; }
    __device__ __forceinline__ u32 empty() const { return barriers + (STAGES + slot) * 8; }
    // Waits until the slot of the tile this many before the next one has been read.
    __device__ __forceinline__ void wait_for_room(u32 tiles) const {
        const bool is_behind = slot >= tiles;
        const u32 there = slot + (is_behind ? 0 : STAGES) - tiles;
        barrier_wait(barriers + (STAGES + there) * 8, is_behind ? parity : parity ^ 1);
    }

    __device__ __forceinline__ void next() {
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void wait_for_kernel_in_front() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

template <bool SHARES>
__device__ __forceinline__ Split read_split(const Arguments& a, int number) {
    const int4* words = a.splits + 2 * number;
    const int4 near = __ldcg(words), far = __ldcg(words + 1);
    Split split{near.x, near.y, near.z, near.w, far.x, far.y, far.z, 1, 0, number, far.z - 1};
    if constexpr (SHARES) {
        const int4 share = __ldcg(a.shares + number);
        split.queries = share.x;
        split.next = share.y;
        split.partial = share.z + (number - split.first) * share.x;
        split.known = share.w;
    }
    return split;
}

// The sequence of a split's or a tile's query.
template <typename OWNER>
__device__ __forceinline__ int sequence_of(const OWNER& owner, int query) {
    return query == 0 ? owner.sequence : owner.next + query - 1;
}

// The splits of a thread block: one item; or, if every item is one split, several in turn.
struct Walk {
    int number, end, stride;
    bool is_item;

    __device__ __forceinline__ Walk(const Arguments& a, int program, int programs) {
        const int items = __ldcg(a.items), splits = __ldcg(a.items + 1);
        const int first = __ldcg(a.items + 2 + program);
        const int behind = __ldcg(a.items + 3 + program);
        is_item = items != splits;
        number = is_item ? first : program;
        end = program >= items ? number : is_item ? behind : splits;
        stride = is_item ? 1 : programs;
    }

    __device__ __forceinline__ bool is_over() const { return number >= end; }

    // Whether at least half of all thread blocks have a split in this round.
    __device__ __forceinline__ bool all_read() const {
        return is_item || (end - number / stride * stride) * 2 >= stride;
    }

    // The split this many steps ahead, or the last one.
    template <bool SHARES>
    __device__ __forceinline__ Split ahead(const Arguments& a, int steps) const {
        const int at = number + steps * stride;
        return read_split<SHARES>(a, at < end ? at : number);
    }
};

// The work of a thread block: the splits of a program, and for each split a key-value head; or,
// with L2 partitions, of each two heads the one on this block's partition.
struct Place {
    int partition;  // -1: any
    int head, program, programs;
};

// Thread blocks take numbers of their own partition as long as it has any left. Correct for any
// mapping: each number of a partition is given out once. Called by a warp.
__device__ __forceinline__ Place find_place(const Arguments& a) {
    const int blocks = gridDim.x, index = blockIdx.x;
    if (!a.page_partitions)
        return {-1, index % a.kv_heads, index / a.kv_heads, blocks / a.kv_heads};
    u32 processor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
    int partition = a.processor_partitions[processor / 32 % 8] >> processor % 32 & 1, number = 0;
    if (threadIdx.x % 32 == 0) {
        number = atomicAdd(a.readers + partition, 1);
        if (number >= blocks / 2) {
            partition ^= 1;
            number = atomicAdd(a.readers + partition, 1);
        }
    }
    partition = __shfl_sync(~0u, partition, 0);
    number = __shfl_sync(~0u, number, 0);
    const int pairs = a.kv_heads / 2;
    return {partition, number % pairs * 2, number / pairs, blocks / a.kv_heads};
}

// Whether a mask hides the key this many places before the query's own.
__device__ __forceinline__ bool is_masked(u64 mask, int places) {
    return places < TREE_BITS && (mask >> (places & (TREE_BITS - 1)) & 1) == 0;
}

__device__ __forceinline__ int tiles_of(const Split& split) {
    return max(1, (split.end - split.start + KEYS - 1) / KEYS);
}

}  // namespace
