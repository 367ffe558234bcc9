// out = x @ w.T + bias, w of integers of 4 or 8 bits, for many rows of x, on Hopper.
//
// A block multiplies 64 x INT_MI x INT_TILES outputs with INT_ROWS rows of x at a time, and takes
// tiles in turn. Each of its INT_TILES warpgroups makes the weights of 64 x INT_MI outputs in
// registers, rounded to x's type. They are the first operand of its products; rows of x are the
// second operand, from shared memory. One thread copies units through a ring in shared memory,
// another thread copies panels of 64 columns of x through a second ring. Units do not depend on
// the preceding kernel: their ring fills before that kernel has finished. The `sharing` blocks of
// a cluster have neighbouring outputs, and send each other slices of the same rows of x. Results
// are transposed in shared memory, and copied from there while the next tile is multiplied.
//
// INT_ROWS: 16 x INT_CHUNKS, up to 256. GEMM_FLOAT16: x is float16 instead of bfloat16. GEMM_GATED:
// w holds gate rows above as many up rows, a multiple of 64; out = silu(x @ gate.T) * (x @ up.T). A
// warpgroup then has 64 gates and the same ups (INT_MI is 2). Others: integer_units.cuh.
#include "register_products.cuh"
#include "results.cuh"
#include "scaled_units.cuh"

namespace {

constexpr int kMultipliers = 128 * INT_TILES;  // threads
constexpr int kBlockUnits = INT_TILES * INT_MI;
constexpr int kOutMi = kIsGated ? 1 : INT_MI;
constexpr int kBlockTiles = INT_TILES * kOutMi;  // of 64 results
constexpr int kPanelBytes = INT_ROWS * kRowBytes;
constexpr int kUnitsBytes = kBlockUnits * kUnitBytes;
constexpr int kSums = INT_ROWS / 2;
constexpr int kMostStages = 16;
constexpr int kCopyRegisters = INT_TILES == 2 ? 40 : 32;
constexpr int kMultiplyRegisters = INT_TILES == 2 ? 232 : 160;

// Steps of 16 inputs whose fragments are made at once, how many of these a unit has, and how many
// a panel of x.
constexpr int kBatch = INT_MI == 1 ? 4 : 2;
constexpr int kBatches = kSteps / kBatch;
constexpr int kOfPanel = kInner / 16 / kBatch;

// Rows of results that are copied at once, from two buffers in turn.
constexpr int kStoreRows = INT_ROWS % 64 == 0 ? 64 : INT_ROWS % 32 == 0 ? 32 : 16;
constexpr int kStoreBytes = kStoreRows * kRowBytes;

}  // namespace

struct Arguments {
    const unsigned char* units;  // [tiles of 64 outputs, inner steps, kUnitBytes]
    const unsigned short* bias;  // [columns], of x's type, or null
    int columns;
    int inner_steps;   // units of a tile
    int unit_tiles;    // tiles of 64 results
    int row_tiles;
    int groups;        // tiles of clusters
    int sharing_bits;  // the binary logarithm of the blocks that share rows of x
    int panel_stages;
    int unit_stages;
};

namespace {

// A block's tile. Rows are processed in bands of about 1,024 that stay in the cache while all
// weights pass; within a band, concurrent blocks have the same weights.
struct Tile {
    int row, first;  // the tile of rows; the first tile of 64 results

    __device__ Tile(const Arguments& args, int group) {
        constexpr int kBand = 1024 / INT_ROWS;
        const int column_groups = args.groups / args.row_tiles;
        const int band = group / (kBand * column_groups);
        const int height = min(kBand, args.row_tiles - band * kBand);
        const int at = group - band * kBand * column_groups;
        const int neighbour = blockIdx.x & ((1 << args.sharing_bits) - 1);
        row = band * kBand + at % height;
        first = ((at / height << args.sharing_bits) + neighbour) * kBlockTiles;
    }
};

struct Ring {
    u32 stages, full, empty;
    int bytes, count;
    int stage = 0;
    u32 parity = 0;

    __device__ u32 at() const { return stages + stage * bytes; }
    __device__ u32 filled() const { return full + 8 * stage; }
    __device__ u32 released() const { return empty + 8 * stage; }
    __device__ void advance() {
        if (++stage == count) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ int first_group(const Arguments& args) {
    return blockIdx.x >> args.sharing_bits;
}

__device__ __forceinline__ int num_clusters(const Arguments& args) {
    return gridDim.x >> args.sharing_bits;
}

__device__ __forceinline__ void copy_units(const Arguments& args, Ring ring) {
    const u64 policy = args.row_tiles == 1 ? kReadOnce : kReadAgain;
    for (int group = first_group(args); group < args.groups; group += num_clusters(args)) {
        const Tile tile(args, group);
        for (int n = 0; n < args.inner_steps; ++n, ring.advance()) {
            barrier_wait(ring.released(), ring.parity ^ 1);
            barrier_arrive_expect(ring.filled(), kUnitsBytes);
#pragma unroll
            for (int i = 0; i < kBlockUnits; ++i) {
                // Tiles beyond the last one repeat it, and store nothing. Ups lie behind gates.
                const int out = min(tile.first + i * kOutMi / INT_MI, args.unit_tiles - 1);
                const int mine = kIsGated && i % 2 ? out + args.unit_tiles : out;
                const u64 at = static_cast<u64>(mine) * args.inner_steps + n;
                copy_bytes(ring.at() + i * kUnitBytes, args.units + at * kUnitBytes, kUnitBytes,
                           ring.filled(), policy);
            }
        }
    }
}

// This block's slice of the rows, for all blocks that share them.
__device__ __forceinline__ void copy_panels(const Arguments& args, Ring ring,
                                            const TensorMap* map) {
    const int neighbour = blockIdx.x & ((1 << args.sharing_bits) - 1);
    const int offset = (INT_ROWS >> args.sharing_bits) * neighbour;
    const u32 peers = (1u << (1 << args.sharing_bits)) - 1;
    wait_for_previous_kernels();
    for (int group = first_group(args); group < args.groups; group += num_clusters(args)) {
        const Tile tile(args, group);
        const int row = tile.row * INT_ROWS + offset;
        for (int n = 0; n < kUnitInputs / kInner * args.inner_steps; ++n, ring.advance()) {
            barrier_wait(ring.released(), ring.parity ^ 1);
            barrier_arrive_expect(ring.filled(), kPanelBytes);
            const u32 to = ring.at() + offset * kRowBytes;
            if (args.sharing_bits) {
                copy_box_to(to, map, ring.filled(), n * kInner, row,
                            static_cast<unsigned short>(peers), kReadByAll);
            } else {
                copy_box_2d(to, map, ring.filled(), n * kInner, row, kReadByAll);
            }
        }
    }
    // Neighbours may write to this block's shared memory until all stages are released.
    for (int n = 0; n < ring.count; ++n, ring.advance()) {
        barrier_wait(ring.released(), ring.parity ^ 1);
    }
}

// The products of one warpgroup. While those of a batch of fragments run, the next fragments are
// made.
struct Multiplier {
    const Arguments& args;
    Ring units, panels;
    ScaledUnit unit[INT_MI];
    u32 a[2][kBatch][INT_MI][4];

    __device__ Multiplier(const Arguments& args, const Ring& units, const Ring& panels)
        : args(args), units(units), panels(panels) {}

    // The first unit of all.
    __device__ __forceinline__ void begin() {
        load();
        release_unit();
        make_batch(0, a[0]);
    }

    __device__ __forceinline__ void load() {
        barrier_wait(units.filled(), units.parity);
#pragma unroll
        for (int i = 0; i < INT_MI; ++i) {
            unit[i].load(units.at() + (warpgroup() * INT_MI + i) * kUnitBytes);
        }
    }

    __device__ __forceinline__ void release_unit() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(units.released());
    }

    __device__ __forceinline__ void release_panel(u32 panel) {
        const int thread = threadIdx.x % 128;
        if (panel && thread >> args.sharing_bits == 0) {
            if (args.sharing_bits) {
                barrier_arrive_at(panel, thread);
            } else {
                barrier_arrive(panel);
            }
        }
    }

    __device__ __forceinline__ void make_batch(int batch, u32 (&to)[kBatch][INT_MI][4]) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
#pragma unroll
            for (int i = 0; i < INT_MI; ++i) unit[i].fragment(batch * kBatch + k, to[k][i]);
        }
    }

    __device__ __forceinline__ void multiply_batch(int n, int batch,
                                                   const u32 (&of)[kBatch][INT_MI][4],
                                                   float (&sums)[INT_MI][kSums]) {
        const u64 rows = operand(panels.at(), 16);
        products_fence();
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            const int step = batch * kBatch + k;
#pragma unroll
            for (int i = 0; i < INT_MI; ++i) {
                add_fragment_product(sums[i], of[k][i], rows + 2 * (step % 4), n > 0 || step > 0);
            }
        }
        products_commit();
    }

    // A tile, whose first fragments are made; and the first fragments of the next tile. Behind the
    // last unit of all the unit is loaded again: a branch would end the overlap.
    __device__ __forceinline__ void multiply(bool is_last, float (&sums)[INT_MI][kSums]) {
        u32 last = 0;
        for (int n = 0; n < args.inner_steps; ++n) {
            const bool has_next = !is_last || n + 1 < args.inner_steps;
#pragma unroll
            for (int batch = 0; batch < kBatches; ++batch) {
                if (batch % kOfPanel == 0) barrier_wait(panels.filled(), panels.parity);
                multiply_batch(n, batch, a[batch % 2], sums);
                if (batch + 1 == kBatches) {
                    if (has_next) units.advance();
                    load();
                    if (has_next) release_unit();
                }
                products_wait<1>();
                // The batch before this one has been multiplied.
                if (batch % kOfPanel == 0) release_panel(last);
                make_batch((batch + 1) % kBatches, a[(batch + 1) % 2]);
                if ((batch + 1) % kOfPanel == 0) {
                    last = panels.released();
                    panels.advance();
                }
            }
        }
        products_wait<0>();
        release_panel(last);
#pragma unroll
        for (int i = 0; i < INT_MI; ++i) pin(sums[i]);
    }
};

// ---- Results.

__device__ __forceinline__ void store_transposed(u32 address, const u32 (&v)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
        : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap* map, u32 from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::
                     "l"(map), "r"(x), "r"(y), "r"(from)
                 : "memory");
}

__device__ __forceinline__ void stores_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most one group of this thread's copies still reads shared memory.
__device__ __forceinline__ void stores_wait() {
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}

__device__ __forceinline__ float bias_of(const Arguments& args, int output) {
    return args.bias ? first_of_pair(args.bias[min(output, args.columns - 1)]) : 0.0f;
}

// Two neighbouring rows' results from the sums of the i-th 64 outputs.
__device__ __forceinline__ u32 result(const float (&sums)[INT_MI][kSums], int i, int at,
                                      float bias) {
    float v[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float sum = sums[i][at + n];
        v[n] = kIsGated ? gated(sum * kDivisor, sums[INT_MI - 1][at + n] * kDivisor)
                        : fmaf(sum, kDivisor, bias);
    }
    return pack<kIsBf16>(v[0], v[1]);
}

// Rows from `row` on, as rows of 64 results in swizzled shared memory.
__device__ __forceinline__ void write_rows(u32 to, const float (&sums)[INT_MI][kSums], int i,
                                           int row, const float (&bias)[2]) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    // A lane names row lane % 8 of matrix lane / 8: eight outputs on, then eight rows.
    const u32 chunk = 2 * warp + lane / 8 % 2;
    const u32 address = to + (lane / 16 * 8 + lane % 8) * kRowBytes + ((chunk ^ lane % 8) << 4);
#pragma unroll
    for (int j = 0; j < kStoreRows / 8; j += 2) {
        u32 v[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            v[m] = result(sums, i, row / 2 + 4 * (j + m / 2) + m % 2 * 2, bias[m % 2]);
        }
        store_transposed(address + 8 * j * kRowBytes, v);
    }
}

__device__ __forceinline__ void store_tile(const Arguments& args, const Tile& tile, u32 buffers,
                                           const TensorMap* map,
                                           const float (&sums)[INT_MI][kSums], int& turn) {
    const int thread = threadIdx.x % 128, name = 1 + warpgroup();
#pragma unroll
    for (int i = 0; i < kOutMi; ++i) {
        const int mine = tile.first + warpgroup() * kOutMi + i;
        const int output = mine * kUnitOutputs + thread / 32 * 16 + thread % 32 / 4;
        const float bias[2] = {bias_of(args, output), bias_of(args, output + 8)};
#pragma unroll
        for (int row = 0; row < INT_ROWS; row += kStoreRows, turn ^= 1) {
            const u32 buffer = buffers + turn * kStoreBytes;
            if (thread == 0) stores_wait();
            named_wait(name, 128);
            write_rows(buffer, sums, i, row, bias);
            fence_shared_for_async();
            named_wait(name, 128);
            if (thread == 0) {
                if (mine < args.unit_tiles) {
                    store_box(map, buffer, mine * kUnitOutputs, tile.row * INT_ROWS + row);
                }
                stores_commit();
            }
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kMultipliers + 128, 1)
    integer_wide(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_out,
                 const Arguments args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ __align__(8) u64 barriers[4 * kMostStages];
    const u32 start = (shared_address(memory) + 1023) & ~1023u;
    const u32 results = start + args.panel_stages * kPanelBytes;
    Ring panels{start, shared_address(barriers), shared_address(barriers + kMostStages),
                kPanelBytes, args.panel_stages};
    Ring units{results + INT_TILES * 2 * kStoreBytes, shared_address(barriers + 2 * kMostStages),
               shared_address(barriers + 3 * kMostStages), kUnitsBytes, args.unit_stages};
    if (threadIdx.x == kMultipliers) {
        prefetch_map(&map_x);
        prefetch_map(&map_out);
        for (int n = 0; n < args.panel_stages; ++n) {
            barrier_init(panels.full + 8 * n, 1);
            barrier_init(panels.empty + 8 * n, INT_TILES << args.sharing_bits);
        }
        for (int n = 0; n < args.unit_stages; ++n) {
            barrier_init(units.full + 8 * n, 1);
            barrier_init(units.empty + 8 * n, 4 * INT_TILES);
        }
        fence_barriers();
    }
    __syncthreads();
    // Other blocks send to this block's barriers.
    if (args.sharing_bits) cluster_sync();
    let_next_kernel_start();
    if (threadIdx.x >= kMultipliers) {
        give_registers<kCopyRegisters>();
        if (threadIdx.x == kMultipliers) copy_units(args, units);
        if (threadIdx.x == kMultipliers + 32) copy_panels(args, panels, &map_x);
        return;
    }
    take_registers<kMultiplyRegisters>();
    float sums[INT_MI][kSums];
    Multiplier multiplier(args, units, panels);
    multiplier.begin();
    const u32 buffers = results + warpgroup() * 2 * kStoreBytes;
    int turn = 0;
    for (int group = first_group(args); group < args.groups; group += num_clusters(args)) {
        multiplier.multiply(group + num_clusters(args) >= args.groups, sums);
        store_tile(args, Tile(args, group), buffers, &map_out, sums, turn);
    }
    // Results must have left shared memory before the block ends.
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
