// Attention of one query a sequence over a paged cache of keys and values.
//
// All keys are shared out over the blocks: a share holds whole sequences, or also the end of
// one and the beginning of another; what a share has of a sequence is a piece. One warp copies
// tiles to shared memory as far ahead as there is room, from sequence to sequence and while
// others multiply. Each of four warps takes 16 keys of a tile with a softmax of its own, and
// at a piece's end they weigh what they have. The pieces of a sequence that is cut are weighed
// by whoever is done last, in their order.

#include "decode_pieces.cuh"
#include "decode_products.cuh"

namespace {

// ---- The warp that copies.

// Lane l has the l-th box of a tile: a block's keys or values, one piece of memory.
template <int HEAD>
struct Copier {
    using S = Shape<HEAD>;
    const TensorMap *blocks, *fews;
    const Arguments& a;
    u32 shared;
    Ring<S::STAGES> ring;
    int kv_head, lane;
    bool has_waited;

    __device__ __forceinline__ int is_value() const { return lane % 2; }
    __device__ __forceinline__ int index() const { return lane / 2; }

    // The block of this lane's box at a key; -1 if there is none.
    __device__ __forceinline__ int block_at(const int* table, int key, int end) const {
        const int own = key + (index() << a.block_shift);
        return own < end && own < key + KEYS ? __ldcg(table + (own >> a.block_shift)) : -1;
    }

    __device__ void copy_tile(int block, int key, int end) {
        barrier_wait(ring.empty(), ring.parity ^ 1);
        const int rows = min(KEYS, end - key);
        const int whole = rows >> a.block_shift << a.block_shift;
        const int copied = whole + (rows - whole + FEW - 1) / FEW * FEW;
        if (lane == 0) barrier_arrive_expect(ring.full(), copied * ROW_BYTES * S::PANELS * 2);
        __syncwarp();
        if (block >= 0) {
            const int first = index() << a.block_shift;
            const u32 to = shared + ring.slot * 2 * S::TILE_BYTES +
                           is_value() * S::TILE_BYTES + first * 2 * HEAD;
            const int half = block * a.halves_per_block + is_value();
            if (first + (1 << a.block_shift) <= rows) {
                copy_box_5d(to, blocks, ring.full(), 0, 0, 0, kv_head, half);
            } else {
                for (int row = 0; row < rows - first; row += FEW)
                    copy_box_5d(to + row * 2 * HEAD, fews, ring.full(), 0, 0, row, kv_head,
                                half);
            }
        }
        ring.next();
    }

    __device__ void copy_share(int first, int end) {
        for (int number = first; number < end; ++number) {
            const Piece piece = read_piece(a.pieces + number);
            const int* table = a.tables + piece.row * a.table_stride;
            const bool has_newest = number == piece.first + piece.count - 1;
            const int tiles = tiles_of(piece);
            int block = block_at(table, piece.start, piece.end);
            for (int tile = 0; tile < tiles; ++tile) {
                const int key = piece.start + tile * KEYS;
                const int next = block_at(table, key + KEYS, piece.end);
                // Only the newest token's key and value are from the kernel in front.
                if (!has_waited && has_newest && tile == tiles - 1) {
                    wait_for_kernel_in_front();
                    has_waited = true;
                }
                copy_tile(block, key, piece.end);
                block = next;
            }
        }
    }
};

template <bool IS_BF16, int HEAD>
__device__ __forceinline__ void decode(const TensorMap* blocks, const TensorMap* fews,
                                       const Arguments& a) {
    using S = Shape<HEAD>;
    extern __shared__ __align__(1024) char memory[];
    const u32 shared = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int kv_head = blockIdx.x % a.kv_heads;
    const int step = gridDim.x / a.kv_heads;
    const u32 barriers = shared + S::BARRIERS;
    asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; ++i) {
            barrier_init(barriers + i * 8, 1);
            barrier_init(barriers + (S::STAGES + i) * 8, CONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (!a.has_old_plan) wait_for_kernel_in_front();
    const int num_shares = __ldcg(a.shares);
    __syncthreads();
    if (warp == CONSUMER_WARPS) {
        prefetch_map(blocks);
        prefetch_map(fews);
        Copier<HEAD> copier{blocks, fews, a,    shared,
                            {barriers}, kv_head, lane, a.has_old_plan == 0};
        for (int share = blockIdx.x / a.kv_heads; share < num_shares; share += step)
            copier.copy_share(__ldcg(a.shares + 1 + share), __ldcg(a.shares + 2 + share));
        return;
    }
    wait_for_kernel_in_front();
    Multiplier<IS_BF16, HEAD> multiplier{a, shared, memory, {barriers}, kv_head, warp, lane};
    for (int share = blockIdx.x / a.kv_heads; share < num_shares; share += step)
        multiplier.take_share(__ldcg(a.shares + 1 + share), __ldcg(a.shares + 2 + share));
}

}  // namespace

#define DECODE(NAME, IS_BF16, HEAD)                                                       \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 2)                       \
        NAME(const __grid_constant__ TensorMap blocks, const __grid_constant__ TensorMap  \
             fews, const __grid_constant__ Arguments arguments) {                         \
        decode<IS_BF16, HEAD>(&blocks, &fews, arguments);                                 \
    }

DECODE(decode_float16_64, false, 64)
DECODE(decode_float16_128, false, 128)
DECODE(decode_bfloat16_64, true, 64)
DECODE(decode_bfloat16_128, true, 128)
