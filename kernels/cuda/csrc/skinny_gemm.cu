// out = x @ w.T for 1 to 64 rows of x, or SwiGLU of the product, on Hopper.
//
// The matrix units take 64 rows of w as the left operand and the rows of x as the right one, so
// that a few rows of x need few registers and little shared memory: the ring holds weights, which
// a block requests before the kernels before this one have ended.
//
// A tile has SKINNY_LINES rows of w, with SKINNY_GATED as many gate rows and as many up rows.
// The left operand's 64 rows may reach beyond a tile's: sums of these are not stored. A stage of
// the ring has SKINNY_PANELS steps of 128 bytes of the inner dimension. SKINNY_TOKENS: 8, 16, 32
// or 64, at least the rows of x. SKINNY_PARTS: out is float32 [split, rows, pitch].
//
// GEMM_FLOAT16: float16 instead of bfloat16. GEMM_FP8: x and w are e4m3, copied as pairs in
// bfloat16, with a scale for each row. The matrix units' own sums of FP8 have 22 bits: they are
// added to float32 after each 128. SKINNY_GROUPS: rows of x have a scale for each 128 values.
// GEMM_INT8: x and w are signed bytes, copied and scaled likewise; sums are exact integers.
#define GEMM_CHUNKS GEMM_PRODUCT_CHUNKS
#include "cluster.cuh"
#include "quantized_rows.cuh"
#include "results.cuh"
#include "wide_product.cuh"

struct Arguments {
    u32* out;         // [rows, pitch], two values a word; or float32 parts
    int rows;         // of x
    int columns;      // of out
    int pitch;        // of rows of out: columns, rounded up to a multiple of 8
    int inner_steps;  // stages that hold the inner dimension, rounded up
    int groups;       // tiles x parts
    int split;        // parts
    int max_early;    // stages of weights in flight before the rows of x are ready
    u64 hint_w;       // cache policy of weights
    const float *scales_x, *scales_w;  // with GEMM_FP8 or GEMM_INT8: of each row
    int scale_pitch, last_group;       // with SKINNY_GROUPS: scales of x [groups, pitch]
};

namespace {

#ifdef GEMM_FLOAT16
constexpr bool kIsBf16 = false;
#else
constexpr bool kIsBf16 = true;
#endif
constexpr int kInner = 64;  // numbers of 2 bytes, or pairs of FP8, of a panel
constexpr int kRowBytes = 2 * kInner;
constexpr int kTokens = SKINNY_TOKENS, kLines = SKINNY_LINES, kPanels = SKINNY_PANELS;
constexpr int kHalves = SKINNY_GATED ? 2 : 1;
constexpr int kBlocksOfHalf = (kLines + 63) / 64, kBlocks = kHalves * kBlocksOfHalf;
constexpr int kHalfBytes = kLines * kRowBytes, kPanelW = kHalves * kHalfBytes;
constexpr int kPanelX = kTokens * kRowBytes, kPanelBytes = kPanelW + kPanelX;
constexpr int kStageBytes = kPanels * kPanelBytes;
constexpr int kSums = kTokens / 2;
constexpr int kPieces = kPanels * kBlocks;  // products of 64 rows by a panel, of a stage
constexpr int kBatch = kPieces < 32 / kSums ? kPieces : 32 / kSums;  // multiplied at once
constexpr int kMultipliers = 128;

static_assert(kSums == kProductSums && kLines % 8 == 0, "tokens fit the product");

// The ring's position of a thread: stages of shared memory, their barriers.
struct Ring {
    u32 tiles, full, empty;
    int stage = 0;
    u32 parity = 0;

    __device__ u32 panel(int number) const {
        return tiles + stage * kStageBytes + number * kPanelBytes;
    }
    __device__ u32 filled() const { return full + 8 * stage; }
    __device__ u32 released() const { return empty + 8 * stage; }
    __device__ void advance() {
        if (++stage == SKINNY_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

#if SKINNY_GROUPS
// The scales of the rows of x in each panel of the ring.
__shared__ __align__(16) float group_scales[SKINNY_STAGES][kPanels][kTokens];
#endif

struct Work {
    int tile, part, first_step, num_steps;

    __device__ Work(const Arguments& args, int group) {
        part = group % args.split;
        tile = group / args.split;
        first_step = args.inner_steps * part / args.split;
        num_steps = args.inner_steps * (part + 1) / args.split - first_step;
    }
};

__device__ __forceinline__ void copy_weights(const Arguments& args, const Ring& ring,
                                             u32 barrier, const TensorMap* map,
                                             const Work& work, int step) {
    barrier_arrive_expect(barrier, kPanels * kPanelW);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
        const int x = ((work.first_step + step) * kPanels + panel) * kInner;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            copy_box_2d(ring.panel(panel) + half * kHalfBytes, map, barrier, x,
                        work.tile * kLines + half * args.columns, args.hint_w);
        }
    }
}

// One thread copies weights. Weights of the first stages are requested before the preceding
// kernels end, `max_early` stages at a time: reads of those kernels would queue behind more.
__device__ __forceinline__ void copy_all_weights(const Arguments& args, Ring ring, u32 landed,
                                                 const TensorMap* map) {
    int group = blockIdx.x;
    int ahead = min(Work(args, group).num_steps, SKINNY_STAGES);
    for (int n = 0; n < ahead + args.max_early; ++n) {
        const int before = n - args.max_early;
        if (before >= 0 && before < ahead) {
            barrier_wait(landed + 8 * before, 0);
            barrier_arrive(ring.full + 8 * before);
        }
        if (n < ahead) {
            copy_weights(args, ring, landed + 8 * n, map, Work(args, group), n);
            ring.advance();
        }
    }
    for (; group < args.groups; group += gridDim.x) {
        const Work work(args, group);
        for (int n = ahead; n < work.num_steps; ++n, ring.advance()) {
            barrier_wait(ring.released(), ring.parity ^ 1);
            copy_weights(args, ring, ring.filled(), map, work, n);
        }
        ahead = 0;
    }
}

// A second thread copies rows of x, as soon as the preceding kernel has written them.
__device__ __forceinline__ void copy_all_rows(const Arguments& args, Ring ring,
                                              const TensorMap* map) {
    wait_for_previous_kernels();
    for (int group = blockIdx.x; group < args.groups; group += gridDim.x) {
        const Work work(args, group);
        for (int n = 0; n < work.num_steps; ++n, ring.advance()) {
            barrier_wait(ring.released(), ring.parity ^ 1);
#if SKINNY_GROUPS
            barrier_arrive_expect(ring.filled(), kPanels * (kPanelX + 4 * args.scale_pitch));
#else
            barrier_arrive_expect(ring.filled(), kPanels * kPanelX);
#endif
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
#if SKINNY_GROUPS
                // Panels behind the last group hold zeros.
                const int group =
                    min((work.first_step + n) * kPanels + panel, args.last_group);
                copy_flat(shared_address(group_scales[ring.stage][panel]),
                          args.scales_x + group * args.scale_pitch, 4 * args.scale_pitch,
                          ring.filled());
#endif
                const int x = ((work.first_step + n) * kPanels + panel) * kInner;
                copy_box_2d(ring.panel(panel) + kPanelW, map, ring.filled(), x, 0, kReadByAll);
            }
        }
    }
}

using Sums = float[kBlocks][kSums];
using Totals = Sum[kBlocks][kSums];  // before they are scaled

__device__ __forceinline__ void clear(Totals& sums) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int n = 0; n < kSums; ++n) sums[block][n] = 0;
    }
}

// The row of w, in its half of a tile, of this thread's sums of a block.
__device__ __forceinline__ int line_of(int block, int half) {
    return block % kBlocksOfHalf * 64 + threadIdx.x / 32 * 16 + 8 * half + threadIdx.x % 32 / 4;
}

// The products of a panel with 64 rows of w.
__device__ __forceinline__ void multiply_piece(const Ring& ring, int piece, Sum (&sums)[kSums],
                                               bool adds) {
    const int block = piece % kBlocks;
    const u32 at = ring.panel(piece / kBlocks);
    const int lines = block / kBlocksOfHalf * kLines + block % kBlocksOfHalf * 64;
    const u64 w = operand(at + lines * kRowBytes, 16);
    const u64 x = operand(at + kPanelW, 16);
#pragma unroll
    for (int k = 0; k < kRowBytes / 32; ++k) {
        if (k == 0 && !adds) {
            put_wide_product(sums, w, x);
        } else {
            add_wide_product(sums, w + 2 * k, x + 2 * k);
        }
    }
}

// The row of x of this thread's sums of a block.
__device__ __forceinline__ int token_of(int sum) {
    return sum / 4 * 8 + threadIdx.x % 4 * 2 + sum % 2;
}

#ifdef GEMM_FP8
// The scales of this thread's rows of x in the panels of a stage.
struct Groups {
#if SKINNY_GROUPS
    float2 of_tokens[kPanels][kSums / 4];

    __device__ __forceinline__ void load(int stage) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
            for (int n = 0; n < kSums / 4; ++n)
                of_tokens[panel][n] = *reinterpret_cast<const float2*>(
                    &group_scales[stage][panel][token_of(4 * n)]);
        }
    }

    __device__ __forceinline__ float added(float sum, float product, int panel, int n) const {
        const float2 both = of_tokens[panel][n / 4];
        return fmaf(product, n % 2 ? both.y : both.x, sum);
    }
#else
    __device__ __forceinline__ void load(int) {}
    __device__ __forceinline__ float added(float sum, float product, int, int) const {
        return sum + product;
    }
#endif
};

// One stage, in batches whose sums fit registers.
__device__ __forceinline__ void multiply_stage(const Ring& ring, Sums& sums,
                                               const Groups& groups) {
#pragma unroll
    for (int first = 0; first < kPieces; first += kBatch) {
        float short_sums[kBatch][kSums];
        products_fence();
#pragma unroll
        for (int piece = first; piece < first + kBatch && piece < kPieces; ++piece) {
            multiply_piece(ring, piece, short_sums[piece - first], false);
        }
        products_commit();
        products_wait<0>();
        if (first + kBatch >= kPieces && threadIdx.x == 0) barrier_arrive(ring.released());
#pragma unroll
        for (int piece = first; piece < first + kBatch && piece < kPieces; ++piece) {
            pin(short_sums[piece - first]);
#pragma unroll
            for (int n = 0; n < kSums; ++n) {
                float& sum = sums[piece % kBlocks][n];
                sum = groups.added(sum, short_sums[piece - first][n], piece / kBlocks, n);
            }
        }
    }
}

#else
__device__ __forceinline__ void multiply_stage(const Ring& ring, Totals& sums) {
    products_fence();
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
        multiply_piece(ring, piece, sums[piece % kBlocks], true);
    products_commit();
    products_wait<0>();
    if (threadIdx.x == 0) barrier_arrive(ring.released());
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) pin(sums[block]);
}
#endif

#if defined(GEMM_FP8) || defined(GEMM_INT8)
// The scales of this thread's rows of w, read while the tile is multiplied, and of its rows of
// x, which the preceding kernel writes.
struct Scales {
    float of_lines[kBlocks][2];
    float of_tokens[kSums / 2];

    __device__ __forceinline__ Scales(const Arguments& args, const Work& work) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int line = work.tile * kLines + line_of(block, half);
                // Rows behind the last one are not stored.
                of_lines[block][half] =
                    __ldg(args.scales_w + block / kBlocksOfHalf * args.columns +
                          min(line, args.columns - 1));
            }
        }
    }

    // After rows of x have arrived.
    __device__ __forceinline__ void load_tokens(const Arguments& args) {
#pragma unroll
        for (int n = 0; n < kSums / 2; ++n) {
#if SKINNY_GROUPS
            // Sums of each group have been multiplied by its scale.
            of_tokens[n] = 1.0f;
#else
            const int token = token_of(n / 2 * 4 + n % 2);
            of_tokens[n] = __ldcg(args.scales_x + min(token, args.rows - 1));
#endif
        }
    }

    // `sums` are `totals` times their scales; both may be the same.
    __device__ __forceinline__ void apply(const Totals& totals, Sums& sums) const {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int n = 0; n < kSums; ++n)
                sums[block][n] = static_cast<float>(totals[block][n]) *
                                 (of_lines[block][n / 2 % 2] * of_tokens[n / 4 * 2 + n % 2]);
        }
    }
};

#endif

#if SKINNY_PARTS
__device__ __forceinline__ void store(const Arguments& args, const Work& work,
                                      const Sums& sums) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int n = 0; n < kSums; ++n) {
            const int line = line_of(block, n / 2 % 2), column = work.tile * kLines + line;
            const int token = n / 4 * 8 + threadIdx.x % 4 * 2 + n % 2;
            if (line >= kLines || column >= args.columns || token >= args.rows) continue;
            const long long row = static_cast<long long>(work.part) * args.rows + token;
            reinterpret_cast<float*>(args.out)[row * args.pitch + column] = sums[block][n];
        }
    }
}
#else
__device__ __forceinline__ float result(const Sums& sums, int block, int n) {
    if (kHalves == 1) return sums[block][n];
    return gated(sums[block][n], sums[(block + kBlocksOfHalf) % kBlocks][n]);
}

// Eight columns of a row of out by four lanes.
__device__ __forceinline__ void store(const Arguments& args, const Work& work,
                                      const Sums& sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int block = 0; block < kBlocksOfHalf; ++block) {
#pragma unroll
        for (int n = 0; n < kSums; n += 2) {
            const int line = block * 64 + warp * 16 + n / 2 % 2 * 8;
            const u32 both = pack<kIsBf16>(result(sums, block, n), result(sums, block, n + 1));
            const u32 columns = transpose_matrix(both);
            const int column = work.tile * kLines + line, token = n / 4 * 8 + lane / 4;
            if (line >= kLines || column >= args.columns || token >= args.rows) continue;
            args.out[(static_cast<long long>(token) * args.pitch + column) / 2 + lane % 4] =
                columns;
        }
    }
}
#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(kMultipliers + 64, 2)
    skinny_gemm(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_w,
                const Arguments args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ __align__(8) u64 barriers[3 * SKINNY_STAGES];
    Ring ring{(shared_address(memory) + 1023) & ~1023u, shared_address(barriers),
              shared_address(barriers + SKINNY_STAGES)};
    if (threadIdx.x == kMultipliers) {
        prefetch_map(&map_w);
        prefetch_map(&map_x);
        for (int n = 0; n < SKINNY_STAGES; ++n) {
            barrier_init(shared_address(barriers + n), 2);
            barrier_init(shared_address(barriers + SKINNY_STAGES + n), 1);
            // Barriers of weights that are requested early.
            barrier_init(shared_address(barriers + 2 * SKINNY_STAGES + n), 1);
        }
        fence_barriers();
    }
    __syncthreads();
    let_next_kernel_start();
    if (threadIdx.x >= kMultipliers) {
        if (threadIdx.x == kMultipliers) {
            copy_all_weights(args, ring, shared_address(barriers + 2 * SKINNY_STAGES), &map_w);
        } else if (threadIdx.x == kMultipliers + 32) {
            copy_all_rows(args, ring, &map_x);
        }
        return;
    }
    for (int group = blockIdx.x; group < args.groups; group += gridDim.x) {
        const Work work(args, group);
        Sums sums;
#ifdef GEMM_FP8
        clear(sums);
        Scales scales(args, work);
        Groups groups;
        for (int n = 0; n < work.num_steps; ++n, ring.advance()) {
            barrier_wait(ring.filled(), ring.parity);
            if (n == 0) scales.load_tokens(args);
            groups.load(ring.stage);
            multiply_stage(ring, sums, groups);
        }
        scales.apply(sums, sums);
#elif defined(GEMM_INT8)
        Totals totals;
        clear(totals);
        Scales scales(args, work);
        for (int n = 0; n < work.num_steps; ++n, ring.advance()) {
            barrier_wait(ring.filled(), ring.parity);
            if (n == 0) scales.load_tokens(args);
            multiply_stage(ring, totals);
        }
        scales.apply(totals, sums);
#else
        clear(sums);
        for (int n = 0; n < work.num_steps; ++n, ring.advance()) {
            barrier_wait(ring.filled(), ring.parity);
            multiply_stage(ring, sums);
        }
#endif
        store(args, work, sums);
    }
}
