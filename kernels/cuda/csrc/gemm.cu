// out = x @ w.T for a few to some hundred rows of x, or SwiGLU of the product, on Hopper.
//
// A block multiplies GEMM_MI x GEMM_WARPGROUPS x 64 rows of x with 16 x GEMM_CHUNKS rows of w.
// One thread copies tiles through a ring of GEMM_STAGES in shared memory; the warpgroups
// multiply. The blocks of a cluster share work in two ways. `split` blocks take a part of the
// inner dimension each and add up through shared memory in a fixed order. `sharing` blocks take
// neighbouring rows of w and send each other slices of the same rows of x, or the other way
// round. Weights do not depend on the preceding kernel: the ring fills with them before that
// kernel has finished.
//
// GEMM_SPLIT: 1 for `split` above 1 in a cluster, which then has one group of tiles.
// GEMM_PARTS: the parts of the inner dimension are not added up: out is float32 [split, rows,
// pitch], and its parts are separate work rather than blocks of a cluster. GEMM_SHARES_WEIGHTS:
// 1 where the blocks that share work have neighbouring rows of x. GEMM_GATED: w holds gate rows
// above as many up rows; out = silu(x @ gate.T) * (x @ up.T). GEMM_FLOAT16: float16 instead of
// bfloat16. GEMM_FP8: x and w are e4m3, copied as pairs in bfloat16, with a scale for each row.
// The matrix units' sums of FP8 have 22 bits. GEMM_GROUPS: rows of x have a scale for each 128
// values, which are copied beside them; sums of 128 values are scaled and added to float32.
// GEMM_INT8: x and w are signed bytes, copied and scaled likewise; sums are exact integers.
#include "gemm_sums.cuh"
#include "wide_product.cuh"
#if defined(GEMM_FP8) || defined(GEMM_INT8)
#define GEMM_BYTES
#include "scaled_sums.cuh"
#endif

namespace {

// A tile's rows of w from `first` on, or this block's slice of them for all blocks that share
// them.
__device__ __forceinline__ void copy_columns(const Arguments& args, const Place& place, u32 to,
                                             u32 barrier, const TensorMap* map, int step,
                                             int first) {
    if (kSharesWeights) {
        const int offset = place.neighbour * args.slice_w;
        copy_box_to(to + offset * kRowBytes, map, barrier, step * kInner, first + offset,
                    peers_of(args, place), args.hint_w);
    } else {
        copy_box_2d(to, map, barrier, step * kInner, first, args.hint_w);
    }
}

__device__ __forceinline__ void copy_weights(const Arguments& args, const Place& place,
                                             const Ring& ring, u32 barrier,
                                             const TensorMap* map, int step, int column_tile) {
    const int first = column_tile * kOutColumns;
    copy_columns(args, place, ring.w(), barrier, map, step, first);
    if (kIsGated) {
        copy_columns(args, place, ring.w() + kTileW / 2, barrier, map, step,
                     args.columns + first);
    }
}

__device__ __forceinline__ void copy_rows(const Arguments& args, const Ring& ring,
                                          const Place& place, const TensorMap* map, int step,
                                          int row_tile) {
    if (kSharesWeights || args.sharing == 1) {
        copy_box_2d(ring.x(), map, ring.filled(), step * kInner, row_tile * kRows, kReadByAll);
    } else {
        const int offset = place.neighbour * args.slice;
        copy_box_to(ring.x() + offset * kRowBytes, map, ring.filled(), step * kInner,
                    row_tile * kRows + offset, peers_of(args, place), kReadByAll);
    }
}

// One thread copies weights. Weights of the first stages are requested before the preceding
// kernels end, limited to what saturates memory: reads of those kernels would queue behind
// more.
__device__ __forceinline__ void copy_all_weights(const Arguments& args, const Place& place,
                                                 Ring ring, u32 landed, const TensorMap* map) {
    int group = place.cluster;
    const Tile first(args, place, group);
    int ahead = group < args.groups ? min(first.num_steps, GEMM_STAGES) : 0;
    for (int n = 0; n < ahead + args.max_early; ++n) {
        if (n >= args.max_early && n - args.max_early < ahead) {
            barrier_wait(landed + 8 * (n - args.max_early), 0);
            barrier_arrive(ring.full + 8 * (n - args.max_early));
        }
        if (n < ahead) {
            barrier_arrive_expect(landed + 8 * n, kTileW);
            copy_weights(args, place, ring, landed + 8 * n, map, first.first_step + n,
                         first.column);
            ring.advance();
        }
    }
    for (; group < args.groups; group += place.num_clusters) {
        const Tile tile(args, place, group);
        for (int n = ahead; n < tile.num_steps; ++n, ring.advance()) {
            barrier_wait(ring.released(), ring.parity ^ 1);
            barrier_arrive_expect(ring.filled(), kTileW);
            copy_weights(args, place, ring, ring.filled(), map, tile.first_step + n,
                         tile.column);
        }
        ahead = 0;
    }
    // Neighbours may write to this block's shared memory until all stages are released.
    for (int n = 0; n < GEMM_STAGES; ++n, ring.advance()) {
        barrier_wait(ring.released(), ring.parity ^ 1);
    }
}

// A second thread copies rows of x, as soon as the preceding kernel has written them.
__device__ __forceinline__ void copy_all_rows(const Arguments& args, const Place& place,
                                              Ring ring, const TensorMap* map) {
    const u32 bytes = args.slice * (kSharesWeights ? 1 : args.sharing) * kRowBytes;
    wait_for_previous_kernels();
    for (int group = place.cluster; group < args.groups; group += place.num_clusters) {
        const Tile tile(args, place, group);
        for (int n = 0; n < tile.num_steps; ++n, ring.advance()) {
            barrier_wait(ring.released(), ring.parity ^ 1);
#ifdef GEMM_GROUPS
            // A neighbour's tile may lie behind the last row.
            const int scales = max(0, min(kRows, args.scale_pitch - tile.row * kRows));
            barrier_arrive_expect(ring.filled(), bytes + 4 * scales);
            if (scales > 0) {
                copy_flat(shared_address(group_scales[ring.stage]),
                          args.scales_x + (tile.first_step + n) * args.scale_pitch +
                              tile.row * kRows,
                          4 * scales, ring.filled());
            }
#else
            barrier_arrive_expect(ring.filled(), bytes);
#endif
            copy_rows(args, ring, place, map, tile.first_step + n, tile.row);
        }
    }
}

// Signals to every block that sends to this one that a stage has been read.
__device__ __forceinline__ void release(const Arguments& args, const Place& place,
                                        u32 barrier) {
    const int lane = threadIdx.x % 128;
    if (args.sharing == 1) {
        if (lane == 0) barrier_arrive(barrier);
    } else if (lane < args.sharing) {
        barrier_arrive_at(barrier, place.part * args.sharing + lane);
    }
}

template <int SUMS>
__device__ __forceinline__ void clear(Sum (&sums)[GEMM_MI][SUMS]) {
#pragma unroll
    for (int i = 0; i < GEMM_MI; ++i) {
#pragma unroll
        for (int n = 0; n < SUMS; ++n) sums[i][n] = 0;
    }
}

#ifdef GEMM_GROUPS
__device__ __forceinline__ void multiply_tile(const Arguments& args, const Place& place,
                                              Ring& ring, const Tile& tile,
                                              float (&sums)[GEMM_MI][kSums]) {
    const int warpgroup = threadIdx.x / 128;
    constexpr int kPieces = GEMM_CHUNKS / GEMM_PRODUCT_CHUNKS, kShort = kSums / kPieces;
    float short_sums[GEMM_MI][kShort];
    clear(sums);
    clear(short_sums);
    Scales scales(args, tile);
    float own[GEMM_MI][2];
    // Products that run while others are added up are serialised by the compiler, and slower.
    for (int n = 0; n < tile.num_steps; ++n, ring.advance()) {
        barrier_wait(ring.filled(), ring.parity);
        load_group(ring.stage, own);
        const u64 x = operand(ring.x() + warpgroup * GEMM_MI * 64 * kRowBytes, 16);
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            const u64 w = operand(ring.w() + piece * (kTileW / kPieces), 16);
            products_fence();
#pragma unroll
            for (int k = 0; k < kRowBytes / 32; ++k) {
#pragma unroll
                for (int i = 0; i < GEMM_MI; ++i) {
                    const u64 rows = x + i * (64 * kRowBytes / 16) + 2 * k;
                    if (k == 0) {
                        put_wide_product(short_sums[i], rows, w);
                    } else {
                        add_wide_product(short_sums[i], rows, w + 2 * k);
                    }
                }
            }
            products_commit();
            if (n == 0 && piece == 0) scales.load_rows(args, tile);
            products_wait<0>();
            if (piece == kPieces - 1) release(args, place, ring.released());
#pragma unroll
            for (int i = 0; i < GEMM_MI; ++i) {
                pin(short_sums[i]);
#pragma unroll
                for (int j = 0; j < kShort; ++j) {
                    float& sum = sums[i][piece * kShort + j];
                    sum = fmaf(short_sums[i][j], own[i][j / 2 % 2], sum);
                }
            }
        }
    }
    scales.apply(args, sums, sums);
}
#else
// Sums of bytes are scaled once they are complete.
__device__ __forceinline__ void multiply_tile(const Arguments& args, const Place& place,
                                              Ring& ring, const Tile& tile,
                                              float (&sums)[GEMM_MI][kSums]) {
    const int warpgroup = threadIdx.x / 128, num_steps = tile.num_steps;
    u32 last = 0;
#ifdef GEMM_BYTES
    Sum totals[GEMM_MI][kSums];
    Scales scales(args, tile);
#else
    float(&totals)[GEMM_MI][kSums] = sums;
#endif
    clear(totals);
    for (int n = 0; n < num_steps; ++n, ring.advance()) {
        barrier_wait(ring.filled(), ring.parity);
        const u64 x = operand(ring.x() + warpgroup * GEMM_MI * 64 * kRowBytes, 16);
        const u64 w = operand(ring.w(), 16);
        products_fence();
#pragma unroll
        for (int k = 0; k < kRowBytes / 32; ++k) {
#pragma unroll
            for (int i = 0; i < GEMM_MI; ++i) {
                add_wide_product(totals[i], x + i * (64 * kRowBytes / 16) + 2 * k, w + 2 * k);
            }
        }
        products_commit();
#ifdef GEMM_BYTES
        if (n == 0) scales.load_rows(args, tile);
#endif
        products_wait<1>();
        if (n > 0) release(args, place, last);
        last = ring.released();
    }
    products_wait<0>();
    release(args, place, last);
#ifdef GEMM_BYTES
#pragma unroll
    for (int i = 0; i < GEMM_MI; ++i) pin(totals[i]);
    scales.apply(args, totals, sums);
#endif
}
#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(kMultipliers + 128, 1)
    gemm(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_w,
         const Arguments args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ __align__(8) u64 barriers[3 * GEMM_STAGES + 1];
    const Place place(args);
    const bool is_cluster = args.sharing > 1 || GEMM_SPLIT;
    Ring ring{(shared_address(memory) + 1023) & ~1023u, shared_address(barriers),
              shared_address(barriers + GEMM_STAGES)};
    if (threadIdx.x == kMultipliers) {
        prefetch_map(&map_x);
        prefetch_map(&map_w);
        for (int n = 0; n < GEMM_STAGES; ++n) {
            barrier_init(ring.full + 8 * n, 2);
            barrier_init(ring.empty + 8 * n, GEMM_WARPGROUPS * args.sharing);
        }
        // Barriers of incoming sums, and of weights requested early.
        for (int n = 2 * GEMM_STAGES; n <= 3 * GEMM_STAGES; ++n) {
            barrier_init(shared_address(barriers + n), 1);
        }
        fence_barriers();
    }
    __syncthreads();
    if (is_cluster) cluster_sync();
    let_next_kernel_start();
    if (threadIdx.x >= kMultipliers) {
        if (kMovesRegisters) give_registers<kCopyRegisters>();
        if (threadIdx.x == kMultipliers) {
            copy_all_weights(args, place, ring, shared_address(barriers + 2 * GEMM_STAGES + 1),
                             &map_w);
        } else if (threadIdx.x == kMultipliers + 32) {
            copy_all_rows(args, place, ring, &map_x);
        }
        __syncwarp();
#if GEMM_SPLIT
        cluster_sync();
        cluster_sync();
#endif
    } else {
        if (kMovesRegisters) take_registers<kMultiplyRegisters>();
        float sums[GEMM_MI][kSums];
        for (int group = place.cluster; group < args.groups; group += place.num_clusters) {
            const Tile tile(args, place, group);
            multiply_tile(args, place, ring, tile, sums);
#if GEMM_SPLIT
            const Exchange exchange(args, place, ring, tile.row,
                                    shared_address(barriers + 2 * GEMM_STAGES));
            reduce_tile(args, place, exchange, sums, tile);
#elif GEMM_PARTS
            store_part(args, tile, sums);
#else
            store_tile(args, tile.row, tile.column, sums);
#endif
        }
    }
}
