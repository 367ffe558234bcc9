// out = x @ w[expert].T for rows of x in the order of their experts, or SwiGLU of the product,
// on Hopper. The number of rows of each expert is on the device only.
//
// A block multiplies GROUPED_MI x GROUPED_WARPGROUPS x 64 rows of a matrix of weights with a
// run of up to 16 x GEMM_CHUNKS rows of x. Rows of x are the instruction's columns, whose
// number can be any multiple of 16, so that few rows cost little; results are transposed before
// they are stored. One thread copies tiles through a ring of GEMM_STAGES in shared memory; the
// warpgroups multiply. The `sharing` blocks of a cluster send each other slices of the same
// tile of weights.
//
// GROUPED_EXPERTS: at least the number of experts. GEMM_GATED: w[expert] holds gate rows above
// as many up rows; out = silu(x @ gate.T) * (x @ up.T). Copies put 8 gate rows and their 8 up
// rows next to each other, so that one thread gets both. GEMM_FLOAT16: float16 instead of
// bfloat16. GEMM_FP8: x and w are e4m3, copied as pairs in bfloat16, with scales
// (grouped_scales.cuh). The matrix units' sums of FP8 have 22 bits; with GEMM_GROUPS the sums of
// 128 inputs are scaled and added to float32.
#include "grouped_tiles.cuh"
#include "results.cuh"
#include "wide_product.cuh"
#ifdef GEMM_FP8
#include "grouped_scales.cuh"
#endif

namespace {

// d = or += w @ x.T with 16 x CHUNKS rows of x.
template <int CHUNKS>
struct Product;

#define PRODUCT_OF(chunks)                                                                   \
    template <>                                                                              \
    struct Product<chunks> {                                                                 \
        template <int SUMS>                                                                  \
        static __device__ __forceinline__ void add(float (&d)[SUMS], u64 w, u64 x) {         \
            asm volatile(CODE(JOIN(SHAPE_, chunks), JOIN(LIST_, chunks), OPERAND_TYPE, "1")  \
                         : JOIN(SUMS_, chunks)                                               \
                         : "l"(w), "l"(x));                                                  \
        }                                                                                    \
        template <int SUMS>                                                                  \
        static __device__ __forceinline__ void put(float (&d)[SUMS], u64 w, u64 x) {         \
            asm volatile(CODE(JOIN(SHAPE_, chunks), JOIN(LIST_, chunks), OPERAND_TYPE, "0")  \
                         : JOIN(SUMS_, chunks)                                               \
                         : "l"(w), "l"(x));                                                  \
        }                                                                                    \
    };
PRODUCT_OF(1)
#if GEMM_CHUNKS >= 2
PRODUCT_OF(2)
#endif
#if GEMM_CHUNKS >= 3
PRODUCT_OF(3)
#endif
#if GEMM_CHUNKS >= 4
PRODUCT_OF(4)
#endif
#if GEMM_CHUNKS >= 5
PRODUCT_OF(5)
#endif
#if GEMM_CHUNKS >= 6
PRODUCT_OF(6)
#endif
#if GEMM_CHUNKS >= 7
PRODUCT_OF(7)
#endif
#if GEMM_CHUNKS >= 8
PRODUCT_OF(8)
#endif
#if GEMM_CHUNKS >= 9
PRODUCT_OF(9)
#endif
#if GEMM_CHUNKS >= 10
PRODUCT_OF(10)
#endif
#if GEMM_CHUNKS >= 11
PRODUCT_OF(11)
#endif
#if GEMM_CHUNKS >= 12
PRODUCT_OF(12)
#endif
#if GEMM_CHUNKS >= 13
PRODUCT_OF(13)
#endif
#if GEMM_CHUNKS >= 14
PRODUCT_OF(14)
#endif
#if GEMM_CHUNKS >= 15
PRODUCT_OF(15)
#endif
#if GEMM_CHUNKS >= 16
PRODUCT_OF(16)
#endif

// A box of weights into every block of the cluster in `mask`.
__device__ __forceinline__ void copy_weights_to(u32 to, const TensorMap* map, u32 barrier, int x,
                                                int row, int expert, unsigned short mask,
                                                u64 policy) {
#ifdef GEMM_GATED
    // Inner dimension, row of eight, gate or up, eights, expert.
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7, %8;" ::
            "r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(0), "r"(row / 16), "r"(expert), "h"(mask),
        "l"(policy)
        : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(row), "r"(expert), "h"(mask), "l"(policy)
        : "memory");
#endif
}

__device__ __forceinline__ void copy_weights(u32 to, const TensorMap* map, u32 barrier, int x,
                                             int row, int expert, u64 policy) {
#ifdef GEMM_GATED
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(0), "r"(row / 16), "r"(expert), "l"(policy)
        : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(row), "r"(expert), "l"(policy)
        : "memory");
#endif
}

// The tensor maps of x: boxes of 64 rows, and of 16 for the rest of a run.
struct RowMaps {
    const TensorMap *narrow, *wide;
};

// One step of the inner dimension into a stage of the ring.
__device__ __forceinline__ void fill_stage(const Arguments& args, const Ring& ring,
                                           const TensorMap* map_w, const RowMaps& maps_x,
                                           const Work& work, int step, int neighbour) {
    barrier_arrive_expect(ring.filled(), kTileW + work.chunks * 16 * kRowBytes);
    if (args.sharing == 1) {
        copy_weights(ring.w(), map_w, ring.filled(), step * kInner, work.column * kWeights,
                     work.expert, args.hint_w);
    } else {
        const int slice = kWeights / args.sharing;
        const unsigned short all = static_cast<unsigned short>((1u << args.sharing) - 1);
        copy_weights_to(ring.w() + neighbour * slice * kRowBytes, map_w, ring.filled(),
                        step * kInner, work.column * kWeights + neighbour * slice, work.expert,
                        all, args.hint_w);
    }
    const int num_wide = work.chunks / 4;
#pragma unroll 1
    for (int n = 0; n < num_wide; ++n) {
        copy_box_2d(ring.x() + n * 64 * kRowBytes, maps_x.wide, ring.filled(), step * kInner,
                    work.first_row + n * 64, kReadByAll);
    }
#pragma unroll 1
    for (int n = 4 * num_wide; n < work.chunks; ++n) {
        copy_box_2d(ring.x() + n * 16 * kRowBytes, maps_x.narrow, ring.filled(), step * kInner,
                    work.first_row + n * 16, kReadByAll);
    }
}

// The copying warpgroup: one of its threads keeps the ring full.
__device__ __forceinline__ void fill_ring(const Arguments& args, const Plan& plan, Ring ring,
                                          const TensorMap* map_w, const RowMaps& maps_x) {
    const int neighbour = args.sharing > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int groups = num_groups(args, plan);
    for (int group = blockIdx.x / args.sharing; group < groups;
         group += gridDim.x / args.sharing) {
        const Work work(args, plan, group, neighbour);
        for (int step = 0; step < args.inner_steps; ++step, ring.advance()) {
            barrier_wait(ring.released(), ring.parity ^ 1);
            fill_stage(args, ring, map_w, maps_x, work, step, neighbour);
        }
    }
    // Neighbours may write to this block's shared memory until all stages are released.
    for (int n = 0; n < GEMM_STAGES; ++n, ring.advance()) {
        barrier_wait(ring.released(), ring.parity ^ 1);
    }
}

// Signals to every block that sends to this one that a stage has been read.
__device__ __forceinline__ void release(const Arguments& args, u32 barrier) {
    const int lane = threadIdx.x % 128;
    if (args.sharing == 1) {
        if (lane == 0) barrier_arrive(barrier);
    } else if (lane < args.sharing) {
        barrier_arrive_at(barrier, lane);
    }
}

// Results of two neighbouring rows, in 8 columns, of the eight rows `tile`: lane l has those of
// column l / 4.
template <int SUMS>
__device__ __forceinline__ u32 result(const float (&sums)[SUMS], int tile, int half) {
    const int at = 4 * tile;
    if (!kIsGated) return pack<kIsBf16>(sums[at + 2 * half], sums[at + 2 * half + 1]);
    return pack<kIsBf16>(gated(sums[at], sums[at + 2]), gated(sums[at + 1], sums[at + 3]));
}

// Stores a run's results: 16 bytes of a row by each lane.
template <int CHUNKS>
__device__ __forceinline__ void store_run(const Arguments& args, const Work& work,
                                          const float (&sums)[GROUPED_MI][8 * GEMM_CHUNKS]) {
    constexpr int kHalves = kIsGated ? 1 : 2;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < GROUPED_MI; ++i) {
        const int unit = (threadIdx.x / 128 * GROUPED_MI + i) * 4 + warp;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            const int column = work.column * kOutColumns + 8 * (kHalves * unit + half);
#pragma unroll
            for (int tile = 0; tile < 2 * CHUNKS; tile += 4) {
                u32 v[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int at = tile + n < 2 * CHUNKS ? tile + n : tile;
                    v[n] = transpose_matrix(result(sums[i], at, half));
                }
                transpose_quad(v);
                const int row = 8 * (tile + lane % 4) + lane / 4;
                if (row < work.rows && column < args.columns) {
                    const long long at =
                        static_cast<long long>(work.first_row + row) * args.columns + column;
                    *reinterpret_cast<uint4*>(args.out + at / 2) =
                        make_uint4(v[0], v[1], v[2], v[3]);
                }
            }
        }
    }
}

#ifdef GEMM_GROUPS
// Multiplies and stores one run. Products that run while others are added up are serialised by the
// compiler, and slower.
template <int CHUNKS>
__device__ __forceinline__ void make_run(const Arguments& args, const Work& work, Ring& ring,
                                         float (&sums)[GROUPED_MI][8 * GEMM_CHUNKS]) {
    float short_sums[GROUPED_MI][8 * CHUNKS];
    Scales<CHUNKS> scales(args, work);
#pragma unroll
    for (int i = 0; i < GROUPED_MI; ++i) {
#pragma unroll
        for (int n = 0; n < 8 * CHUNKS; ++n) sums[i][n] = 0.0f;
    }
    for (int step = 0; step < args.inner_steps; ++step, ring.advance()) {
        scales.load_step(args, step);
        barrier_wait(ring.filled(), ring.parity);
        const u64 w = operand(ring.w() + threadIdx.x / 128 * GROUPED_MI * 64 * kRowBytes, 16);
        const u64 x = operand(ring.x(), 16);
        products_fence();
#pragma unroll
        for (int k = 0; k < kRowBytes / 32; ++k) {
#pragma unroll
            for (int i = 0; i < GROUPED_MI; ++i) {
                const u64 rows = w + i * (64 * kRowBytes / 16) + 2 * k;
                if (k == 0) {
                    Product<CHUNKS>::put(short_sums[i], rows, x);
                } else {
                    Product<CHUNKS>::add(short_sums[i], rows, x + 2 * k);
                }
            }
        }
        products_commit();
        products_wait<0>();
        release(args, ring.released());
#pragma unroll
        for (int i = 0; i < GROUPED_MI; ++i) {
            pin(short_sums[i]);
            scales.add(i, short_sums[i], sums[i]);
        }
    }
    store_run<CHUNKS>(args, work, sums);
}
#else
// Multiplies and stores one run.
template <int CHUNKS>
__device__ __forceinline__ void make_run(const Arguments& args, const Work& work, Ring& ring,
                                         float (&sums)[GROUPED_MI][8 * GEMM_CHUNKS]) {
    u32 last = 0;
#ifdef GEMM_FP8
    Scales<CHUNKS> scales(args, work);
#endif
#pragma unroll
    for (int i = 0; i < GROUPED_MI; ++i) {
#pragma unroll
        for (int n = 0; n < 8 * CHUNKS; ++n) sums[i][n] = 0.0f;
    }
    for (int step = 0; step < args.inner_steps; ++step, ring.advance()) {
        barrier_wait(ring.filled(), ring.parity);
        const u64 w = operand(ring.w() + threadIdx.x / 128 * GROUPED_MI * 64 * kRowBytes, 16);
        const u64 x = operand(ring.x(), 16);
        products_fence();
#pragma unroll
        for (int k = 0; k < kInner / 16; ++k) {
#pragma unroll
            for (int i = 0; i < GROUPED_MI; ++i) {
                Product<CHUNKS>::add(sums[i], w + i * (64 * kRowBytes / 16) + 2 * k, x + 2 * k);
            }
        }
        products_commit();
        products_wait<1>();
        if (step > 0) release(args, last);
        last = ring.released();
    }
    products_wait<0>();
    release(args, last);
#ifdef GEMM_FP8
#pragma unroll
    for (int i = 0; i < GROUPED_MI; ++i) pin(sums[i]);
    scales.apply(sums);
#endif
    store_run<CHUNKS>(args, work, sums);
}
#endif

// The narrowest instruction that is wide enough.
template <int CHUNKS>
__device__ __forceinline__ void make_fitting_run(const Arguments& args, const Work& work,
                                                 Ring& ring,
                                                 float (&sums)[GROUPED_MI][8 * GEMM_CHUNKS]) {
    if constexpr (CHUNKS == GEMM_CHUNKS) {
        make_run<CHUNKS>(args, work, ring, sums);
    } else {
        if (work.chunks == CHUNKS) {
            make_run<CHUNKS>(args, work, ring, sums);
        } else {
            make_fitting_run<CHUNKS + 1>(args, work, ring, sums);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kMultipliers + 128, 1)
    grouped_gemm(const __grid_constant__ TensorMap map_w,
                 const __grid_constant__ TensorMap map_narrow,
                 const __grid_constant__ TensorMap map_wide, const Arguments args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ __align__(8) u64 barriers[2 * GEMM_STAGES];
    __shared__ Plan plan;
    // The compiler may place this array behind other shared variables, at a multiple of its
    // alignment.
    Ring ring{shared_address(memory), shared_address(barriers),
              shared_address(barriers + GEMM_STAGES)};
    if (threadIdx.x == kMultipliers) {
        prefetch_map(&map_w);
        prefetch_map(&map_narrow);
        prefetch_map(&map_wide);
        for (int n = 0; n < GEMM_STAGES; ++n) {
            barrier_init(ring.full + 8 * n, 1);
            barrier_init(ring.empty + 8 * n, GROUPED_WARPGROUPS * args.sharing);
        }
        fence_barriers();
    }
    let_next_kernel_start();
    wait_for_previous_kernels();
    if (threadIdx.x < 32) make_plan(args, plan);
    __syncthreads();
    if (args.sharing > 1) cluster_sync();
    if (threadIdx.x >= kMultipliers) {
        if (GROUPED_WARPGROUPS > 1) give_registers<kCopyRegisters>();
        if (threadIdx.x == kMultipliers) {
            fill_ring(args, plan, ring, &map_w, RowMaps{&map_narrow, &map_wide});
        }
        __syncwarp();
    } else {
        if (GROUPED_WARPGROUPS > 1) take_registers<kMultiplyRegisters>();
        float sums[GROUPED_MI][8 * GEMM_CHUNKS];
        const int neighbour = args.sharing > 1 ? static_cast<int>(cluster_rank()) : 0;
        const int groups = num_groups(args, plan);
        for (int group = blockIdx.x / args.sharing; group < groups;
             group += gridDim.x / args.sharing) {
            const Work work(args, plan, group, neighbour);
            make_fitting_run<1>(args, work, ring, sums);
        }
    }
}
