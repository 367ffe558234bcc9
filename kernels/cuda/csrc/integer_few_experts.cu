// The products of integer_experts.cu for experts with few rows, whose time is that of reading the
// weights.
//
// All tiles of 64 outputs of all experts with rows are divided into equal shares for the blocks. A
// block takes up to INT_TILES x INT_MI tiles at a time, which may be the last of one run of rows and
// the first of the next: a piece of few tiles takes as long as one of many. Each warp multiplies the
// weights of 16 outputs of its tiles, which it makes in registers, with a run of up to 16 rows of x,
// by instructions of a warp: products of a warpgroup would have its warps wait for each other. One
// thread copies units through a ring in shared memory, another thread copies rows of x.
//
// GROUPED_EXPERTS: at least the number of experts. Others: expert_units.cuh.
#include "warp_products.cuh"

namespace {

constexpr int kMostRows = 16, kBlockUnits = INT_TILES * INT_MI;

}  // namespace

#include "expert_units.cuh"

namespace {

constexpr int kCopiers = 64;
constexpr int kEightBytes = 8 * kRowBytes;  // of eight rows of x, in a panel

// Neighbouring tiles of a run, with all of its rows.
struct Part {
    int expert, first_row, rows, tile, count;

    // The tiles from the at-th of all on: at most `most`.
    __device__ Part(const Arguments& args, const Plan& plan, int at, int most) {
        expert = expert_of(args, plan, at);
        const int row_start = expert ? plan.row_end[expert - 1] : 0;
        const int all = plan.row_end[expert] - row_start;
        const int within = at - (expert ? plan.group_end[expert - 1] : 0);
        const int run = within / args.unit_tiles;
        tile = within % args.unit_tiles;
        count = min(most, args.unit_tiles - tile);
        const int length = run_length(all, group_runs(args, all));
        const int start = min(run * length, all);
        rows = min(length, all - start);
        first_row = row_start + start;
    }
};

// The tiles that a block multiplies at a time: those of a part, and of the next if all rows of both
// fit in a stage, as eight rows each.
struct Piece {
    Part first, second;
    bool is_split;
    int count;

    // From the at-th tile of all on, to the end of a block's share at the latest.
    __device__ Piece(const Arguments& args, const Plan& plan, int at, int end)
        : first(args, plan, at, min(kBlockUnits, end - at)), second(first), is_split(false) {
        count = first.count;
        const int left = min(kBlockUnits, end - at) - count;
        if (!left || first.rows > 8) return;
        second = Part(args, plan, at + count, left);
        is_split = second.rows <= 8;
        if (is_split) count += second.count;
    }

    __device__ int columns() const { return is_split ? 16 : columns_of(first.rows); }
    __device__ bool is_second(int at) const { return at >= first.count; }

    // The part that has the at-th tile, from that tile on.
    __device__ Part part_at(int at) const {
        Part part = is_second(at) ? second : first;
        part.tile += at - (is_second(at) ? first.count : 0);
        return part;
    }
};

// The first tile of a block's share.
__device__ __forceinline__ int share_start(const Arguments& args, const Plan& plan, u32 block) {
    const u64 all = static_cast<u64>(num_groups(args, plan));
    return static_cast<int>(all * block / gridDim.x);
}

// Runs `take` for each piece of this block's share.
template <class TAKE>
__device__ __forceinline__ void for_each_piece(const Arguments& args, const Plan& plan, TAKE take) {
    const int end = share_start(args, plan, blockIdx.x + 1);
    for (int at = share_start(args, plan, blockIdx.x); at < end;) {
        const Piece piece(args, plan, at, end);
        take(piece);
        at += piece.count;
    }
}

__device__ __forceinline__ void copy_units(const Arguments& args, const Plan& plan,
                                           UnitRing ring) {
    const u64 pitch = tile_bytes(args);
    for_each_piece(args, plan, [&](const Piece& piece) {
        const unsigned char* first = units_of(args, piece.first.expert, piece.first.tile);
        // Where the second part's units would be if its tiles had the first part's numbers too.
        const unsigned char* second = units_of(args, piece.second.expert, piece.second.tile) -
                                      piece.first.count * pitch;
        for (int n = 0; n < args.inner_steps; ++n, ring.advance()) {
            const auto unit_at = [&](int i) {
                return (piece.is_second(i) ? second : first) + i * pitch + n * kUnitBytes;
            };
            fill_units(ring, piece.count, unit_at, kReadOnce);
        }
    });
}

__device__ __forceinline__ void copy_rows(const Arguments& args, const Plan& plan, UnitRing ring,
                                          const RowMaps& maps) {
    for_each_piece(args, plan, [&](const Piece& piece) {
        const int columns = piece.columns();
        const auto row_at = [&](int row) {
            return row && piece.is_split ? piece.second.first_row : piece.first.first_row + row;
        };
        for (int n = 0; n < args.inner_steps; ++n, ring.advance()) {
            fill_rows(ring, maps, columns, n, row_at);
        }
    });
}

// The products of one warp, with DEPTH tiles and EIGHTS eights of rows at a time.
struct Multiplier {
    const Arguments& args;
    UnitRing ring;
    u32 offsets[2];  // of this lane's 16 bytes of x: even and odd steps of 32 inputs of a panel

    __device__ Multiplier(const Arguments& args, const UnitRing& ring) : args(args), ring(ring) {
        const u32 row = threadIdx.x % 8, chunk = threadIdx.x % 32 / 8;
        offsets[0] = row * kRowBytes + ((chunk ^ row) << 4);
        offsets[1] = offsets[0] ^ 64;
    }

    // Tiles of a split piece have eight rows each, which begin at `eights` bytes of a panel.
    template <bool IS_SPLIT, int DEPTH, int EIGHTS>
    __device__ __forceinline__ void multiply_units(u32 x, const u32 (&eights)[DEPTH],
                                                   const ExpertUnit (&units)[DEPTH],
                                                   float (&sums)[DEPTH][EIGHTS][4]) {
        constexpr int kLoads = IS_SPLIT ? DEPTH : EIGHTS;
#pragma unroll
        for (int pair = 0; pair < kSteps / 2; ++pair) {
            const u32 panel = x + pair / 2 * kPanelBytes + offsets[pair % 2];
            u32 b[kLoads][4];
#pragma unroll
            for (int n = 0; n < kLoads; ++n) {
                load_matrices<false>(b[n], panel + (IS_SPLIT ? eights[n] : n * kEightBytes));
            }
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    u32 a[4];
                    units[i].fragment(2 * pair + k, a);
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e) {
                        const u32(&own)[4] = b[IS_SPLIT ? i : e];
                        ::multiply<kIsBf16>(sums[i][e], a, own[2 * k], own[2 * k + 1]);
                    }
                }
            }
        }
    }

    template <int DEPTH, int EIGHTS, bool IS_SPLIT>
    __device__ __forceinline__ void take(const Piece& piece) {
        const int own = warpgroup();
        float sums[DEPTH][EIGHTS][4] = {};
        u32 eights[DEPTH];
        Biases biases[DEPTH];  // whose loads end during the products
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            const int at = own + i * INT_TILES;
            const Part part = piece.part_at(at);
            eights[i] = piece.is_second(at) ? kEightBytes : 0;
            if (at < piece.count) biases[i].load(args, part.expert, part.tile);
        }
        for (int n = 0; n < args.inner_steps; ++n, ring.advance()) {
            barrier_wait(ring.filled(), ring.parity);
            ExpertUnit units[DEPTH];
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) units[i].load(ring.unit(own + i * INT_TILES));
            multiply_units<IS_SPLIT>(ring.x(), eights, units, sums);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(ring.released());
        }
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            const int at = own + i * INT_TILES;
            if (at >= piece.count) return;
            float flat[kSums];
#pragma unroll
            for (int n = 0; n < 4 * EIGHTS; ++n) flat[n] = sums[i][n / 4][n % 4];
            const Part part = piece.part_at(at);
            store_tile<EIGHTS - 1>(args, part, part.tile, biases[i], flat);
        }
    }

    // As many tiles at a time as the piece needs, DEPTH at most.
    template <int DEPTH>
    __device__ __forceinline__ void take(const Piece& piece) {
        if constexpr (DEPTH > 1) {
            if (piece.count <= (DEPTH - 1) * INT_TILES) return take<DEPTH - 1>(piece);
        }
        if (piece.first.rows > 8) return take<DEPTH, 2, false>(piece);
        // One tile has one part's rows, which it finds as a tile of a split piece does.
        if (DEPTH == 1 || piece.is_split) return take<DEPTH, 1, true>(piece);
        take<DEPTH, 1, false>(piece);
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads + kCopiers, 1)
    integer_few_experts(const __grid_constant__ TensorMap map_narrow,
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
    if (threadIdx.x == kThreads) {
        copy_units(args, plan, ring);
    } else if (threadIdx.x == kThreads + 32) {
        // Rows of x are the preceding kernel's results.
        if (args.is_early) wait_for_previous_kernels();
        copy_rows(args, plan, ring, RowMaps{&map_narrow, &map_wide});
    } else if (threadIdx.x < kThreads) {
        Multiplier multiplier(args, ring);
        for_each_piece(args, plan,
                       [&](const Piece& piece) { multiplier.take<INT_MI>(piece); });
    }
}
