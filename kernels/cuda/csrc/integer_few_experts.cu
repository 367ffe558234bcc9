// The products of integer_experts.cu for experts with few rows, whose time is that of reading the
// weights.
//
// All tiles of 64 outputs of all experts with rows are divided into equal shares for the blocks. A
// block takes up to 64 x INT_TILES x INT_MI outputs of an expert at a time. Each warp multiplies the
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

// Neighbouring tiles of a run, with all of its rows.
struct Piece {
    int expert, first_row, rows, tile, count;

    // The tiles from the at-th of all on, to the end of a block's share at the latest.
    __device__ Piece(const Arguments& args, const Plan& plan, int at, int end) {
        expert = expert_of(args, plan, at);
        const int row_start = expert ? plan.row_end[expert - 1] : 0;
        const int all = plan.row_end[expert] - row_start;
        const int within = at - (expert ? plan.group_end[expert - 1] : 0);
        const int run = within / args.unit_tiles;
        tile = within % args.unit_tiles;
        count = min(kBlockUnits, min(end - at, args.unit_tiles - tile));
        const int length = run_length(all, group_runs(args, all));
        const int start = min(run * length, all);
        rows = min(length, all - start);
        first_row = row_start + start;
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
    for_each_piece(args, plan, [&](const Piece& piece) {
        const unsigned char* from = units_of(args, piece.expert, piece.tile);
        for (int n = 0; n < args.inner_steps; ++n, ring.advance()) {
            fill_units(args, ring, from, piece.count, n, kReadOnce);
        }
    });
}

__device__ __forceinline__ void copy_rows(const Arguments& args, const Plan& plan, UnitRing ring,
                                          const RowMaps& maps) {
    for_each_piece(args, plan, [&](const Piece& piece) {
        const int columns = columns_of(piece.rows);
        for (int n = 0; n < args.inner_steps; ++n, ring.advance()) {
            fill_rows(ring, maps, piece.first_row, columns, n);
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

    template <int DEPTH, int EIGHTS>
    __device__ __forceinline__ void multiply_units(u32 x, const ExpertUnit (&units)[DEPTH],
                                                   float (&sums)[DEPTH][EIGHTS][4]) {
#pragma unroll
        for (int pair = 0; pair < kSteps / 2; ++pair) {
            const u32 panel = x + pair / 2 * kPanelBytes + offsets[pair % 2];
            u32 b[EIGHTS][4];
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) load_matrices<false>(b[e], panel + e * 8 * kRowBytes);
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    u32 a[4];
                    units[i].fragment(2 * pair + k, a);
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e) {
                        ::multiply<kIsBf16>(sums[i][e], a, b[e][2 * k], b[e][2 * k + 1]);
                    }
                }
            }
        }
    }

    template <int DEPTH, int EIGHTS>
    __device__ __forceinline__ void take(const Piece& piece) {
        const int own = warpgroup();
        float sums[DEPTH][EIGHTS][4] = {};
        for (int n = 0; n < args.inner_steps; ++n, ring.advance()) {
            barrier_wait(ring.filled(), ring.parity);
            ExpertUnit units[DEPTH];
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) units[i].load(ring.unit(own + i * INT_TILES));
            multiply_units<DEPTH, EIGHTS>(ring.x(), units, sums);
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
            store_tile<EIGHTS - 1>(args, piece, piece.tile + at, flat);
        }
    }

    template <int DEPTH>
    __device__ __forceinline__ void take(const Piece& piece) {
        if (piece.rows <= 8) return take<DEPTH, 1>(piece);
        take<DEPTH, 2>(piece);
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
        for_each_piece(args, plan, [&](const Piece& piece) {
            if (INT_MI > 1 && piece.count > INT_TILES) return multiplier.take<INT_MI>(piece);
            multiplier.take<1>(piece);
        });
    }
}
