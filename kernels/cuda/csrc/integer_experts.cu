// out = x @ w[expert].T for rows of x in the order of their experts, or SwiGLU of the product, with
// weights of integers or FP4 numbers, on Hopper. The number of rows of each expert is on the device
// only.
//
// A block multiplies 64 x INT_TILES rows of a matrix of weights with a run of up to INT_ROWS rows of
// x, and takes tiles in turn. Each of its warpgroups makes the weights of 64 outputs in registers,
// rounded to x's type. They are the first operand of its products; rows of x are the second operand,
// from shared memory. An instruction has as many columns as the run needs: 8, 16, 32, 64, 96 or 128.
// One thread copies units through a ring in shared memory, another thread copies rows of x. For few
// rows see integer_few_experts.cu.
//
// GROUPED_EXPERTS: at least the number of experts. INT_ROWS: 16 x INT_CHUNKS, 64 or 128. Others:
// expert_units.cuh.
#include "register_products.cuh"

namespace {

constexpr int kMostRows = INT_ROWS, kBlockUnits = INT_TILES;

}  // namespace

#include "expert_units.cuh"

namespace {

// With many sums the copying threads are a warpgroup, which gives most of its registers away.
constexpr bool kMovesRegisters = INT_ROWS > 64;
constexpr int kCopiers = kMovesRegisters ? 128 : 64;
constexpr int kCopyRegisters = 40, kMultiplyRegisters = 232;

// Steps of 16 inputs whose fragments are made at once, and how many of these a unit has.
constexpr int kBatch = 2;
constexpr int kBatches = kSteps / kBatch;

// `operand` of rows of x, whose lower half alone depends on the address, in a form that the compiler
// takes as uniform in a warp: instructions read descriptors from uniform registers.
__device__ __forceinline__ u64 uniform_operand(u32 address) {
    const u64 descriptor = operand(address, 16);
    const u32 low = __shfl_sync(0xffffffffu, static_cast<u32>(descriptor), 0);
    return operand(0, 0) | low;
}

__device__ __forceinline__ void copy_units(const Arguments& args, const Plan& plan,
                                           UnitRing ring) {
    const int groups = num_groups(args, plan);
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
        const Work work(args, plan, group, 0);
        const int first = work.column * kBlockUnits;
        // Behind the last tile the ring keeps what it had, and results are not stored.
        const int count = min(kBlockUnits, args.unit_tiles - first);
        const unsigned char* from = units_of(args, work.expert, first);
        const u64 pitch = tile_bytes(args);
        // Other runs of the expert read the weights again.
        const u64 policy = work.is_only ? kReadOnce : kReadAgain;
        for (int n = 0; n < args.inner_steps; ++n, ring.advance(), from += kUnitBytes) {
            fill_units(ring, count, [&](int i) { return from + i * pitch; }, policy);
        }
    }
}

__device__ __forceinline__ void copy_rows(const Arguments& args, const Plan& plan, UnitRing ring,
                                          const RowMaps& maps) {
    const int groups = num_groups(args, plan);
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
        const Work work(args, plan, group, 0);
        const int columns = columns_of(work.rows);
        for (int n = 0; n < args.inner_steps; ++n, ring.advance()) {
            fill_rows(ring, maps, columns, n, [&](int row) { return work.first_row + row; });
        }
    }
}

// d = or += a @ x.T with 16 x CHUNKS columns, or 8 for no chunk.
template <int CHUNKS>
struct FragmentProduct;

#define FRAGMENT_PRODUCT_OF(chunks)                                                           \
    template <>                                                                               \
    struct FragmentProduct<chunks> {                                                          \
        static __device__ __forceinline__ void add(float (&d)[kSums], const u32* a, u64 x,    \
                                                   int adds) {                                \
            asm volatile(FRAGMENT_CODE(JOIN(FRAGMENT_, chunks), JOIN(LIST_, chunks), NUMBERS) \
                         : JOIN(SUMS_, chunks)                                                \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(adds));    \
        }                                                                                     \
    };
FRAGMENT_PRODUCT_OF(0)
FRAGMENT_PRODUCT_OF(1)
FRAGMENT_PRODUCT_OF(2)
FRAGMENT_PRODUCT_OF(4)
#if INT_ROWS == 128
FRAGMENT_PRODUCT_OF(6)
FRAGMENT_PRODUCT_OF(8)
#endif

// The products of one warpgroup. While those of a batch of fragments run, the next fragments are
// made.
struct Multiplier {
    const Arguments& args;
    const int tile;
    UnitRing ring;
    u32 last = 0;  // the barrier of the preceding unit
    ExpertUnit unit;
    u32 a[2][kBatch][4];

    __device__ Multiplier(const Arguments& args, const UnitRing& ring)
        : args(args), tile(warpgroup()), ring(ring) {}

    __device__ __forceinline__ void load() {
        barrier_wait(ring.filled(), ring.parity);
        unit.load(ring.unit(tile));
    }

    __device__ __forceinline__ void make_batch(int batch, u32 (&to)[kBatch][4]) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) unit.fragment(batch * kBatch + k, to[k]);
    }

    // The first unit of all.
    __device__ __forceinline__ void begin() {
        load();
        make_batch(0, a[0]);
    }

    __device__ __forceinline__ void release() {
        __syncwarp();
        if (last && threadIdx.x % 32 == 0) barrier_arrive(last);
    }

    template <int CHUNKS>
    __device__ __forceinline__ void multiply_batch(u64 x, int batch, const u32 (&of)[kBatch][4],
                                                   float (&sums)[kSums], bool is_first) {
        products_fence();
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            const int step = batch * kBatch + k;
            // A panel has four steps of 32 bytes; descriptors count 16 bytes.
            const u64 rows = x + step / 4 * (kPanelBytes / 16) + 2 * (step % 4);
            FragmentProduct<CHUNKS>::add(sums, of[k], rows, k > 0 || !is_first);
        }
        products_commit();
    }

    // A tile, whose first fragments are made; and the first fragments of the next tile. Behind the
    // last unit of all the unit is loaded again: a branch would end the overlap.
    template <int CHUNKS>
    __device__ __forceinline__ void multiply(bool is_last, float (&sums)[kSums]) {
        for (int n = 0; n < args.inner_steps; ++n) {
            const u64 x = uniform_operand(ring.x());
            const u32 released = ring.released();
#pragma unroll
            for (int batch = 0; batch < kBatches; ++batch) {
                multiply_batch<CHUNKS>(x, batch, a[batch % 2], sums, n == 0 && batch == 0);
                if (batch + 1 == kBatches) {
                    if (!is_last || n + 1 < args.inner_steps) ring.advance();
                    load();
                }
                products_wait<1>();
                // The batch before this one has been multiplied.
                if (batch == 0) release();
                make_batch((batch + 1) % kBatches, a[(batch + 1) % 2]);
            }
            last = released;
        }
        products_wait<0>();
        pin(sums);
        release();
        last = 0;
    }
};

template <int CHUNKS>
__device__ __forceinline__ void make_run(const Arguments& args, const Work& work, bool is_last,
                                         Multiplier& multiplier, float (&sums)[kSums]) {
    multiplier.multiply<CHUNKS>(is_last, sums);
    const int tile = work.column * kBlockUnits + warpgroup();
    if (tile >= args.unit_tiles) return;
    Biases biases;
    biases.load(args, work.expert, tile);
    store_tile<CHUNKS>(args, work, tile, biases, sums);
}

__device__ __forceinline__ void make_fitting_run(const Arguments& args, const Work& work,
                                                 bool is_last, Multiplier& multiplier,
                                                 float (&sums)[kSums]) {
    const int columns = columns_of(work.rows);
    if (columns == 8) return make_run<0>(args, work, is_last, multiplier, sums);
    if (columns == 16) return make_run<1>(args, work, is_last, multiplier, sums);
    if (columns == 32) return make_run<2>(args, work, is_last, multiplier, sums);
    if (columns == 64) return make_run<4>(args, work, is_last, multiplier, sums);
#if INT_ROWS == 128
    if (columns == 96) return make_run<6>(args, work, is_last, multiplier, sums);
    make_run<8>(args, work, is_last, multiplier, sums);
#endif
}

__device__ __forceinline__ void multiply_groups(const Arguments& args, const Plan& plan,
                                                const UnitRing& ring) {
    const int groups = num_groups(args, plan);
    if (blockIdx.x >= groups) return;
    float sums[kSums];
    Multiplier multiplier(args, ring);
    multiplier.begin();
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
        const bool is_last = group + gridDim.x >= groups;
        make_fitting_run(args, Work(args, plan, group, 0), is_last, multiplier, sums);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads + kCopiers, 1)
    integer_experts(const __grid_constant__ TensorMap map_narrow,
                    const __grid_constant__ TensorMap map_wide, const Arguments args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ __align__(8) u64 barriers[2 * kMostStages];
    __shared__ Plan plan;
    UnitRing ring{(shared_address(memory) + 1023) & ~1023u, shared_address(barriers),
                   shared_address(barriers + kMostStages), args.stages};
    if (threadIdx.x == kThreads) {
        prefetch_map(&map_narrow);
        prefetch_map(&map_wide);
        init_ring(ring, 4 * INT_TILES);
    }
    // The next kernel may read the totals as soon as its blocks start.
    if (!args.is_early) wait_for_previous_kernels();
    let_next_kernel_start();
    if (threadIdx.x < 32) make_plan(args, plan);
    __syncthreads();
    if (threadIdx.x >= kThreads) {
        if (kMovesRegisters) give_registers<kCopyRegisters>();
        if (threadIdx.x == kThreads) copy_units(args, plan, ring);
        if (threadIdx.x == kThreads + 32) {
            // Rows of x are the preceding kernel's results.
            if (args.is_early) wait_for_previous_kernels();
            copy_rows(args, plan, ring, RowMaps{&map_narrow, &map_wide});
        }
    } else {
        if (kMovesRegisters) take_registers<kMultiplyRegisters>();
        multiply_groups(args, plan, ring);
    }
}
