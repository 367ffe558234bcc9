// The warp that copies queries, keys and values to shared memory.
#pragma once

#include "attention_tiles.cuh"

namespace {

// Copies the tiles of keys or values of one work item; lane l copies the l-th block. Tokens are
// stored in groups of 8, each with all its panels, so that every block is one copy, however
// short.
template <int HEAD>
struct CacheReader {
    using S = Shape<HEAD>;
    const TensorMap* cache;
    const Arguments& a;
    const int* table;
    int num_keys, lane, kv_head;

    // The block of this lane's box in a step; -1 if there is none.
    __device__ __forceinline__ int block_of(int step) const {
        const int blocks = KEYS >> a.block_shift, index = step * blocks + lane;
        const bool is_used = step >= 0 && lane < blocks && (index << a.block_shift) < num_keys;
        return is_used ? __ldg(table + index) : -1;
    }

    __device__ __forceinline__ void copy(Ring<S::STAGES>& ring, u32 tiles, int block,
                                         int is_value) {
        ring.wait_empty();
        const int used = __popc(__ballot_sync(~0u, block >= 0));
        const int box_bytes = (HEAD * 2) << a.block_shift;
        if (lane == 0) barrier_arrive_expect(ring.full(), used * box_bytes);
        __syncwarp();
        if (block >= 0) {
            const u32 to = tiles + ring.slot() * S::TILE_BYTES + lane * box_bytes;
            const int piece = block * a.block_pieces + is_value * a.half_pieces +
                              kv_head * a.head_pieces;
            copy_box_5d(to, cache, ring.full(), 0, 0, 0, 0, piece, kReadAgain);
        }
        __syncwarp();
        ++ring.count;
    }
};

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
        // Heads in order: concurrent blocks share keys and values in the L2 cache.
        const int kv_head = item / num_tiles;
        const Tile tile = arguments.tiles[1 + item - kv_head * num_tiles];
        int next = 0;
        if (lane == 0) next = atomicAdd(&arguments.tiles[0].position, 1) + gridDim.x;
        CacheReader<HEAD> reader{cache, arguments,
                                 arguments.tables + tile.row * arguments.table_stride,
                                 num_keys(tile), lane, kv_head};
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
        // The last block resets the counters for the next launch.
        __threadfence();
        if (atomicAdd(&arguments.tiles[0].row, 1) == static_cast<int>(gridDim.x) - 1) {
            arguments.tiles[0].position = 0;
            arguments.tiles[0].row = 0;
        }
    }
}

}  // namespace
