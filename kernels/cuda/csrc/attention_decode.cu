// Attention of one query a sequence over a paged cache of keys and values.
//
// DECODE_COLUMNS above 8 is for steps in which several queries follow each other in one
// sequence: a token and its drafts. They share one read of the keys, as long as their heads fit
// the columns, and each sees the keys up to its own. A query's result is the same with any
// number of other queries, and with 8 columns, given the same cuts of its keys.
//
// The keys of all sequences are distributed over the thread blocks as work items. An item holds
// whole sequences, or also the end of one and the beginning of another; the part of a sequence
// in an item is a split. One warp walks the splits and copies their queries and tiles to shared
// memory as far ahead as there is room, across sequences, while the other warps multiply. With
// each tile it passes a descriptor, so that the other warps never wait for global memory. Each
// of four warps takes 16 keys of a tile with a softmax of its own, and the warps combine their
// results at a split's end. The warp that finishes last combines the splits of a sequence, in
// their order.
//
// With DECODE_TREES a mask says which of the last keys a query sees: drafts may form a tree, in
// which a token follows some of the tokens before it. Masks are a variant of the kernels, so that
// they cost chains nothing. A key that is hidden has no weight, as keys behind the last one.
//
// DECODE_STORED names the numbers of the cache: those of queries, FP8 or INT8. Bytes are
// multiplied in float16, which holds both. Scales of keys are factors of the scores, scales of
// values factors of the result.
//
// If the L2 partition of each head is known (`kv_cache_partitions.py`), thread blocks read the
// heads of their own partition, which takes less power and time.

#include "decode_splits.cuh"
#include "decode_products.cuh"

namespace {

// ---- The warp that copies.

// Lane l has the l-th box of a tile: a block's keys or values, contiguous in memory.
template <int HEAD, int STORED, int COLUMNS>
struct Copier {
    using S = Shape<HEAD, STORED, COLUMNS>;
    const TensorMap *blocks, *fews;
    const Arguments& a;
    u32 shared;
    char* memory;
    Ring<S::STAGES> ring;
    int lane;
    bool has_waited;
    int kv_head;  // of the split
    u32 turn = 0;  // place of the queries of several tokens

    __device__ __forceinline__ int is_value() const { return lane % 2; }
    __device__ __forceinline__ int index() const { return lane / 2; }

    // The block of this lane's box at a key; -1 if there is none.
    __device__ __forceinline__ int block_at(const int* table, int key, int end) const {
        const int own = key + (index() << a.block_shift);
        return own < end && own < key + KEYS ? __ldcg(table + (own >> a.block_shift)) : -1;
    }

    // Bytes copied for a number of rows: a short tile's last box may hold more.
    __device__ __forceinline__ int bytes_of(int rows) const {
        const int whole = rows >> a.block_shift << a.block_shift;
        return (whole + (rows - whole + FEW - 1) / FEW * FEW) * S::TOKEN_BYTES * 2;
    }

    // Waits for a free slot, and announces the tile and its number of bytes.
    __device__ __forceinline__ void announce(const Tile& tile, int bytes) {
        barrier_wait(ring.empty(), ring.parity ^ 1);
        if (lane == 0) {
            int4* to = reinterpret_cast<int4*>(memory + S::TILES + ring.slot * sizeof(Tile));
            to[0] = make_int4(tile.rows_and_flags, tile.sequence, tile.number, tile.count);
            to[1] = make_int4(tile.first_cut, tile.heads, static_cast<int>(tile.newest),
                              static_cast<int>(tile.newest >> 32));
            if constexpr (S::HAS_SEEN)
                to[2] = make_int4(tile.queries, tile.next, tile.partial, tile.seen);
            barrier_arrive_expect(ring.full(), bytes);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void copy_boxes(int block, int rows) {
        const int first = index() << a.block_shift;
        const u32 to = shared + ring.slot * 2 * S::TILE_BYTES + is_value() * S::TILE_BYTES +
                       first * S::TOKEN_BYTES;
        const int half = block * a.halves_per_block + is_value();
        if (block < 0) return;
        if (first + (1 << a.block_shift) <= rows) {
            copy_box_5d(to, blocks, ring.full(), 0, 0, 0, kv_head, half, kReadOnce);
        } else {
            for (int row = 0; row < rows - first; row += FEW)
                copy_box_5d(to + row * S::TOKEN_BYTES, fews, ring.full(), 0, 0, row, kv_head,
                            half, kReadOnce);
        }
    }

    // Rows of the step's token that a sequence attends with, copied beside the tile in a slot.
    __device__ __forceinline__ void copy_rows(int sequence, int head, int count, u32 slot,
                                              u32 place, int to_row) {
        const char* token = static_cast<const char*>(a.query) + 2 * sequence * a.query_stride;
        copy_flat(beside(place, to_row), token + 2 * head * HEAD, count * HEAD * 2,
                   ring.barriers + slot * 8);
    }

    __device__ __forceinline__ void copy_angles(const Split& split, u32 slot) {
        const int position = max(split.length - 1, 0);
        copy_flat(beside(slot, ANGLE_ROWS), a.angles + static_cast<long long>(position) * HEAD,
                   HEAD * 4, ring.barriers + slot * 8);
    }

    __device__ __forceinline__ u32 beside(u32 place, int row) const {
        return shared + S::BESIDES + place * S::BESIDE_BYTES + row * HEAD * 2;
    }

    __device__ __forceinline__ int query_bytes(const Split& split) const {
        if constexpr (S::SHARES) return split.queries * a.group * HEAD * 2;
        return a.group * HEAD * 2 + (a.angles ? HEAD * 4 : 0);
    }

    // `is_late`: the block's first split, whose first tiles have been announced.
    __device__ __forceinline__ void copy_query(const Split& split, u32 slot, bool is_late) {
        if constexpr (S::SHARES) {
            // The tile with which the split before the last one began has been read.
            if (!is_late) ring.wait_for_room(S::BESIDE_PLACES);
            if (lane < split.queries)
                copy_rows(sequence_of(split, lane), kv_head * a.group, a.group, slot, turn,
                          lane * a.group);
            turn ^= 1;
        } else if (lane == 0) {
            copy_rows(split.sequence, kv_head * a.group, a.group, slot, slot, 0);
            if (a.angles) copy_angles(split, slot);
        }
        __syncwarp();
    }

    // A tile in which the split begins has the angles already.
    __device__ __forceinline__ int newest_bytes(bool begins) const {
        return 2 * HEAD * 2 + (begins ? 0 : HEAD * 4);
    }

    __device__ __forceinline__ void copy_newest(const Split& split, bool begins) {
        if (lane == 0) {
            const int key = a.kv_heads * a.group + kv_head;
            copy_rows(split.sequence, key, 1, ring.slot, ring.slot, KEY_ROW);
            copy_rows(split.sequence, key + a.kv_heads, 1, ring.slot, ring.slot, VALUE_ROW);
            if (!begins) copy_angles(split, ring.slot);
        }
        __syncwarp();
    }

    // The slot in the cache of the key of a tile's row.
    __device__ __forceinline__ long long place_in_cache(int block, int row) const {
        const int own = __shfl_sync(~0u, block, (row >> a.block_shift) * 2);
        const int token = row & ((1 << a.block_shift) - 1);
        return own * a.cache_block_stride + token * a.cache_token_stride +
               kv_head * a.cache_head_stride;
    }

    __device__ __forceinline__ void wait_once() {
        if (!has_waited) wait_for_kernel_in_front();
        has_waited = true;
    }

    __device__ __forceinline__ int first_block_of(const Split& split) const {
        return block_at(a.tables + split.row * a.table_stride, split.start, split.end);
    }

    // `flags` are those of the split's last tile.
    __device__ __forceinline__ void copy_split(const Split& split, int block, Tile tile,
                                               int flags, bool all_read) {
        const int* table = a.tables + split.row * a.table_stride;
        const bool has_newest = tile.number == split.first + split.count - 1;
        const int tiles = tiles_of(split);
        const u32 begin = ring.slot;
        for (int i = 0; i < tiles; ++i) {
            const int key = split.start + i * KEYS;
            const int rows = min(KEYS, split.end - key);
            const int next = block_at(table, key + KEYS, split.end);
            const bool begins = i == 0, ends = i == tiles - 1;
            const bool has_row =
                !S::SHARES && has_newest && ends && rows > 0 && a.angles;
            // Queries and keys and values of the step come from the preceding kernel.
            const bool has_new =
                S::SHARES ? key + rows > split.known : has_newest && ends;
            if (!has_waited && (i == S::STAGES || has_new)) {
                wait_once();
                if (!begins) copy_query(split, begin, true);
            }
            // The ring is not read before the first query arrives.
            if (all_read && has_waited && tiles > LONG_TILES && i >= S::FEW_STAGES)
                ring.wait_for_room(S::FEW_STAGES);
            if (has_row) tile.newest = place_in_cache(block, rows - 1);
            tile.rows_and_flags = rows | (begins ? BEGINS : 0) | (ends ? ENDS | flags : 0) |
                                  (has_row ? HAS_NEWEST : 0);
            tile.seen = split.length - key;
            announce(tile, bytes_of(rows) + (begins ? query_bytes(split) : 0) +
                               (has_row ? newest_bytes(begins) : 0));
            if (begins && has_waited) copy_query(split, begin, false);
            if (has_row) copy_newest(split, begins);
            copy_boxes(block, rows);
            ring.next();
            block = next;
        }
        if (!has_waited) {
            wait_once();
            copy_query(split, begin, true);
        }
    }

    // The one of two neighbouring heads that is on this thread block's L2 partition. All KV
    // blocks of the sequence are on the partition of the first KV block.
    __device__ __forceinline__ int head_of(const Place& place, int first_block) const {
        if (place.partition < 0) return place.head;
        const u64 address = reinterpret_cast<u64>(a.cache) +
                            S::SIZE * (first_block * a.cache_block_stride +
                                       place.head * a.cache_head_stride);
        // A sequence without keys may have any block.
        const long long asked = static_cast<long long>(address >> PAGE_SHIFT) - a.first_page;
        const int page = asked >= 0 && asked < a.num_pages ? static_cast<int>(asked) : 0;
        const u32 of_page = __ldg(a.page_partitions + page / 32) >> page % 32;
        return place.head + ((__popc(static_cast<u32>(address) & a.partition_mask) + of_page +
                              place.partition) & 1);
    }

    __device__ __forceinline__ int first_of_sequence(const Split& split) const {
        return __ldcg(a.tables + split.row * a.table_stride);
    }

    __device__ __forceinline__ Split ahead(const Walk& walk, int steps) const {
        return walk.template ahead<S::SHARES>(a, steps);
    }

    // Requested a split ahead: each answer takes as long as a tile.
    __device__ void copy(const Place& place) {
        Walk walk{a, place.program, place.programs};
        if (walk.is_over()) {
            announce({IS_FINAL}, 0);
            return;
        }
        const int first = walk.number;
        bool is_cut = false;
        Split split = ahead(walk, 0), next = ahead(walk, 1);
        int block = first_block_of(split);
        kv_head = head_of(place, first_of_sequence(split));
        const int first_head = kv_head;
        for (; !walk.is_over(); walk.number += walk.stride) {
            const Split after = ahead(walk, 2);
            const int first_of_next = first_block_of(next);
            const int sequence_of_next = first_of_sequence(next);
            const bool is_final = walk.number + walk.stride >= walk.end;
            is_cut = split.count > 1 || (is_cut && walk.is_item);
            // Only the first and the last sequence of an item can have splits in other items.
            const bool finishes = is_cut && (is_final || !walk.is_item);
            const int first_cut = walk.is_item ? first : walk.number;
            const int heads = kv_head | (walk.is_item ? first_head : kv_head) << 16;
            copy_split(split, block,
                       {0, split.sequence, walk.number, split.count, first_cut, heads, 0,
                        split.queries, split.next, split.partial, 0},
                       (finishes ? FINISHES : 0) | (is_final ? IS_FINAL : 0), walk.all_read());
            block = first_of_next;
            kv_head = head_of(place, sequence_of_next);
            split = next;
            next = after;
        }
    }
};

template <bool IS_BF16, int HEAD, int STORED, int COLUMNS>
__device__ __forceinline__ void decode(const TensorMap* blocks, const TensorMap* fews,
                                       const Arguments& a) {
    using S = Shape<HEAD, STORED, COLUMNS>;
    extern __shared__ __align__(1024) char memory[];
    const u32 shared = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 barriers = shared + S::BARRIERS;
    asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; ++i) {
            barrier_init(barriers + i * 8, 1);
            barrier_init(barriers + (S::STAGES + i) * 8, CONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (!a.reads_ahead) wait_for_kernel_in_front();
    __syncthreads();
    if (warp == CONSUMER_WARPS) {
        prefetch_map(blocks);
        prefetch_map(fews);
        Copier<HEAD, STORED, COLUMNS> copier{blocks, fews, a, shared, memory, {barriers}, lane,
                                             a.reads_ahead == 0};
        copier.copy(find_place(a));
        return;
    }
    wait_for_kernel_in_front();
    Multiplier<IS_BF16, HEAD, STORED, COLUMNS>{{a, memory, warp, lane}, shared, {barriers}}
        .take_all();
}

}  // namespace

#define DECODE(NAME, IS_BF16, HEAD)                                                       \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 2)                       \
        NAME(const __grid_constant__ TensorMap blocks, const __grid_constant__ TensorMap  \
             fews, const __grid_constant__ Arguments arguments) {                         \
        decode<IS_BF16, HEAD, DECODE_STORED, DECODE_COLUMNS>(&blocks, &fews, arguments);  \
    }

DECODE(decode_float16_64, false, 64)
DECODE(decode_float16_128, false, 128)
DECODE(decode_bfloat16_64, true, 64)
DECODE(decode_bfloat16_128, true, 128)
#if DECODE_STORED == 0
DECODE(decode_float16_96, false, 96)
DECODE(decode_bfloat16_96, true, 96)
#endif
