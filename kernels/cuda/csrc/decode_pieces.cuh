// What the warps of a decode's attention share: pieces of sequences, and a ring of tiles.
#pragma once

#include "hopper.cuh"

namespace {

constexpr int KEYS = 64;
constexpr int WARP_KEYS = 16;
constexpr int CONSUMER_WARPS = 4;
constexpr int CONSUMERS = 32 * CONSUMER_WARPS;
constexpr int ROW_BYTES = 128;  // that a swizzle covers
constexpr int PANEL = ROW_BYTES / 2;  // columns
constexpr int MAX_GROUP = 8;
constexpr int EXCHANGED = 4;  // queries of a group that warps weigh at once
constexpr int FEW = 8;  // tokens of the smaller box
constexpr int STAGE_BYTES_OF_ALL = 98304;
// So much is under way within a long piece while all blocks read: more only lengthens the queue
// for memory, and by that all waits. Short ones need it all, so that their ends hold nothing up.
constexpr int STAGE_BYTES_OF_FEW = 65536;
constexpr int LONG_TILES = 10;
constexpr int PAGE_SHIFT = 21;  // pages of memory that change the side

// Named barriers; 0 is the block's own.
constexpr int IS_FREE = 1;   // what the warps exchange has been read
constexpr int IS_THERE = 2;  // it has been written

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

struct alignas(16) Piece {
    int sequence;
    int row;         // of the block table
    int start, end;  // its keys
    int first;       // piece of the sequence
    int count;       // of pieces of the sequence
    int length;      // of the sequence
    int unused;
};

struct Arguments {
    void* output;
    const void* query;
    const int* tables;
    // The numbers of shares and of pieces, each share's first piece, the number of pieces.
    const int* shares;
    const Piece* pieces;
    int* counters;    // [S, K]: pieces done; zero before and after a launch
    float* partial;   // [pieces, N, H]
    float* log_sums;  // [pieces, N]: base 2
    long long query_stride, output_stride, table_stride;
    float scale_log2;
    int group, kv_heads, block_shift;
    // Whether shares, pieces and tables were complete before the kernel in front began.
    int has_old_plan;
    int halves_per_block;
    // [positions, HEAD], cosines and then sines; or null where queries and keys come rotated,
    // and all of the latter in the cache. Where it is given, queries are followed by the
    // tokens' keys and then their values, and groups are of 4 at most.
    const float* angles;
    char* cache;
    long long cache_block_stride, cache_half_stride, cache_token_stride, cache_head_stride;
    // What `memory_sides.MemorySides` says of the cache; no pages where any block reads any head.
    const u32* page_sides;
    // Of each side the number of thread blocks that read there, zero before a launch.
    int* readers;
    long long first_page;
    int num_pages;
    u32 side_mask;
    u32 processor_sides[8];
};

// What the warp that copies says of a tile in the ring.
struct alignas(16) Tile {
    int rows_and_flags;  // of keys, in the lowest byte
    int sequence;
    int number, count;  // of the piece, and of pieces of the sequence
    int first_cut;      // with FINISHES: the other piece of this block that may be cut
    int heads;          // key-value heads of the piece, and of that other one above 16 bits
    long long newest;  // with HAS_NEWEST: where the last row's key goes in the cache
};

constexpr int BEGINS = 256;       // a piece
constexpr int ENDS = 512;         // a piece
constexpr int FINISHES = 1024;    // cut pieces have ended
constexpr int IS_FINAL = 2048;    // nothing comes behind
constexpr int HAS_NEWEST = 4096;  // the last row is not in the cache yet

// Rows of HEAD numbers beside a tile: the queries of a piece that begins there, the key and
// value of a token that is not in the cache yet, and the cosines and sines of either.
constexpr int KEY_ROW = 4, VALUE_ROW = 5, ANGLE_ROWS = 6;

template <int HEAD>
struct Shape {
    static constexpr int PANELS = HEAD / PANEL;
    static constexpr int TILE_BYTES = KEYS * HEAD * 2;
    static constexpr int STAGES = STAGE_BYTES_OF_ALL / (2 * TILE_BYTES);
    static constexpr int FEW_STAGES = STAGE_BYTES_OF_FEW / (2 * TILE_BYTES);
    static constexpr int BESIDE_BYTES = MAX_GROUP * HEAD * 2;  // of a tile
    static constexpr int BESIDES = STAGE_BYTES_OF_ALL;
    static constexpr int EXCHANGE = BESIDES + STAGES * BESIDE_BYTES;
    static constexpr int EXCHANGE_ROW = HEAD + 4;  // so that rows begin in different banks
    static constexpr int STATISTICS = EXCHANGE + CONSUMER_WARPS * EXCHANGED * EXCHANGE_ROW * 4;
    static constexpr int TILES = STATISTICS + CONSUMER_WARPS * EXCHANGED * 8;
    static constexpr int BARRIERS = TILES + STAGES * static_cast<int>(sizeof(Tile));
    static constexpr int FLAGS = BARRIERS + 16 * STAGES;
};

// The addresses of the ring's barriers and where this thread stands in it.
template <int STAGES>
struct Ring {
    u32 barriers;
    u32 slot = 0, parity = 0;

    __device__ __forceinline__ u32 full() const { return barriers + slot * 8; }
    __device__ __forceinline__ u32 empty() const { return barriers + (STAGES + slot) * 8; }
    // Waits until what came so many tiles before the next has been read.
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

__device__ __forceinline__ Piece read_piece(const Piece* piece) {
    const int4* words = reinterpret_cast<const int4*>(piece);
    const int4 a = __ldcg(words), b = __ldcg(words + 1);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// The pieces of a block: a share; or, where every share is one piece, several in turn.
struct Walk {
    int number, end, stride;
    bool is_share;

    __device__ __forceinline__ Walk(const Arguments& a, int program, int programs) {
        const int shares = __ldcg(a.shares), pieces = __ldcg(a.shares + 1);
        const int first = __ldcg(a.shares + 2 + program);
        const int behind = __ldcg(a.shares + 3 + program);
        is_share = shares != pieces;
        number = is_share ? first : program;
        end = program >= shares ? number : is_share ? behind : pieces;
        stride = is_share ? 1 : programs;
    }

    __device__ __forceinline__ bool is_over() const { return number >= end; }

    // Whether at least half of all blocks have a piece in this one's turn.
    __device__ __forceinline__ bool all_read() const {
        return is_share || (end - number / stride * stride) * 2 >= stride;
    }

    // The piece so many steps ahead, or the last one.
    __device__ __forceinline__ Piece ahead(const Arguments& a, int steps) const {
        const int at = number + steps * stride;
        return read_piece(a.pieces + (at < end ? at : number));
    }
};

// What falls to a thread block: the pieces of a program, and of each a key-value head; or,
// where memory has two sides, of each two heads the one that lies on this side.
struct Place {
    int side;  // -1: any
    int head, program, programs;
};

// Thread blocks on one side's processors read there, as long as that side has something left.
// Correct whatever the sides are: each number of a side is given out once. Called by a warp.
__device__ __forceinline__ Place find_place(const Arguments& a) {
    const int blocks = gridDim.x, index = blockIdx.x;
    if (!a.page_sides) return {-1, index % a.kv_heads, index / a.kv_heads, blocks / a.kv_heads};
    u32 processor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
    int side = a.processor_sides[processor / 32 % 8] >> processor % 32 & 1, number = 0;
    if (threadIdx.x % 32 == 0) {
        number = atomicAdd(a.readers + side, 1);
        if (number >= blocks / 2) {
            side ^= 1;
            number = atomicAdd(a.readers + side, 1);
        }
    }
    side = __shfl_sync(~0u, side, 0);
    number = __shfl_sync(~0u, number, 0);
    const int pairs = a.kv_heads / 2;
    return {side, number % pairs * 2, number / pairs, blocks / a.kv_heads};
}

__device__ __forceinline__ int tiles_of(const Piece& piece) {
    return max(1, (piece.end - piece.start + KEYS - 1) / KEYS);
}

}  // namespace
