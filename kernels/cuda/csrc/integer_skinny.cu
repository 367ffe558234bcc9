// out = x @ w.T + bias, or SwiGLU of the product, for 1 to 8 rows of x and w of integers of 4 or 8
// bits, on Hopper.
//
// A block multiplies SKINNY_SLICES slices of 16 outputs, so that every processor reads about as
// many weights. Its warps take units of 128 inputs in turn, each with a ring of its own in shared
// memory, which the warp fills itself; SKINNY_WARPS_N warps divide the slices of a unit. A warp's
// registers hold the integers, the first operand of the matrix units, and rows of x, the second
// one. The sums of a group of inputs are multiplied by its scales in float32. In the end the sums of
// the warps are added up in shared memory, in a fixed order. Weights do not depend on the preceding
// kernel: the rings fill with them before that kernel has ended.
//
// SKINNY_WARPS: warps of a block. SKINNY_STAGES: units in a ring. SKINNY_GATED: the first half of the
// slices are gates, the other half their ups. GEMM_FLOAT16: x is float16 instead of bfloat16.
// Others: integer_units.cuh.
#include "integer_units.cuh"
#include "results.cuh"
#include "warp_products.cuh"

namespace {

constexpr int kWarps = SKINNY_WARPS, kWarpsN = SKINNY_WARPS_N, kWarpsK = kWarps / kWarpsN;
constexpr int kSlices = SKINNY_SLICES, kStages = SKINNY_STAGES;
constexpr int kHalves = SKINNY_GATED ? 2 : 1;
constexpr int kOfHalf = kSlices / kHalves;  // slices of results
constexpr int kOwn = kSlices / kWarpsN;     // slices of a warp
constexpr int kSliceOutputs = 16;
constexpr int kPerUnit = kUnitOutputs / kSliceOutputs;
constexpr int kRunBytes = 512;  // a slice's words, of which each lane loads four at once
constexpr int kRuns = kWords / 4;
constexpr int kScalesOfSlice = kScaleBytes / kPerUnit, kZerosOfSlice = 128 / kPerUnit;
// Weights of a unit in a ring: words, scales, zeros.
constexpr int kScalesAt = kOwn * kRuns * kRunBytes;
constexpr int kZerosAt = kScalesAt + INT_GROUPS * kOwn * kScalesOfSlice;
constexpr int kWeightBytes = kZerosAt + INT_GROUPS * INT_ZEROS * kOwn * kZerosOfSlice;
constexpr int kUnitRowBytes = 2 * kUnitInputs;
constexpr int kPitch = kUnitRowBytes + 16;  // rows of x, spread over the banks
constexpr int kMostRows = 8;
constexpr int kChains = 2;  // sums that wait for different products

static_assert(kSlices % kHalves == 0, "as many gates as ups");
static_assert(kOwn * kWarpsN == kSlices && kWarpsK * kWarpsN == kWarps, "each warp has as many slices, of as many warps");
static_assert(kOwn * kScalesOfSlice <= 32 * 16, "a lane copies scales of a group at once");

}  // namespace

struct Arguments {
    const unsigned char* units;  // [tiles of 64 outputs, inner steps, kUnitBytes]
    const unsigned char* x;      // [rows, pitch]
    void* out;                   // [rows, columns] of x's type or float32
    const unsigned short* bias;  // [columns], of x's type, or null
    int rows;
    int columns;      // of out, a multiple of 8
    int pitch;        // bytes from one row of x to the next
    int inner_steps;  // units of the inner dimension
    int slices;       // of 16 outputs, of one half if gated; at least a block's
    int tiles;        // of a block's slices
    int sums_at;      // where the warps' sums lie; 0: in the rings, if blocks have one tile
    int is_float;     // whether out is float32
};

namespace {

__device__ __forceinline__ int lane_of() { return threadIdx.x % 32; }

// The warp in a form that the compiler takes as uniform in a warp.
__device__ __forceinline__ int warp_of() {
    return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
}

// Warps of the same place along the inner dimension have every kWarpsK-th unit of it.
__device__ __forceinline__ int warp_k_of() { return warp_of() / kWarpsN; }

__device__ __forceinline__ int units_of(const Arguments& args) {
    return (args.inner_steps - warp_k_of() + kWarpsK - 1) / kWarpsK;
}

// The first slice of a tile. The last tile begins where it has all of its slices: some results are
// stored twice, with equal bits.
__device__ __forceinline__ int slice_of(const Arguments& args, int tile) {
    return min(tile * kOfHalf, args.slices - kOfHalf);
}

// ---- Copies, of 16 bytes by each lane.

__device__ __forceinline__ void copy_16(u32 to, const unsigned char* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// A warp's place in its ring, and the tiles of its block. What is copied next runs ahead of what
// is multiplied.
struct Cursor {
    const Arguments& args;
    const u32 ring, stage_bytes;
    int tile = blockIdx.x, left, slot = 0;

    __device__ Cursor(const Arguments& args, u32 ring, u32 stage_bytes)
        : args(args), ring(ring), stage_bytes(stage_bytes), left(units_of(args)) {}

    __device__ __forceinline__ bool has_unit() const { return left > 0 && tile < args.tiles; }
    __device__ __forceinline__ u32 stage() const { return ring + slot * stage_bytes; }

    // Whether the next unit is the first one of another tile.
    __device__ __forceinline__ bool advance() {
        if (++slot == kStages) slot = 0;
        if (--left > 0) return false;
        tile += gridDim.x;
        left = units_of(args);
        return true;
    }
};

struct WeightCursor : Cursor {
    const unsigned char* words;   // of this lane in the next unit, without offsets
    const unsigned char* scales;  // likewise, and of zeros
    const unsigned char* zeros;
    u32 offsets[kOwn];

    __device__ WeightCursor(const Arguments& args, u32 ring, u32 stage_bytes)
        : Cursor(args, ring, stage_bytes) {
        begin();
    }

    // The bytes before a slice's first unit for this warp.
    __device__ __forceinline__ u64 unit_of(int slice) const {
        const u64 unit = static_cast<u64>(slice / kPerUnit) * args.inner_steps + warp_k_of();
        return unit * kUnitBytes;
    }
    // The s-th slice of this warp in all of the weight.
    __device__ __forceinline__ int own_slice(int s) const {
        const int own = warp_of() % kWarpsN * kOwn + s;
        return slice_of(args, tile) + own % kOfHalf + own / kOfHalf * args.slices;
    }

    template <int BYTES>
    __device__ __forceinline__ const unsigned char* group_of(int offset) const {
        constexpr int kChunks = BYTES / 16;
        const int slice = own_slice(min(lane_of() / kChunks, kOwn - 1));
        return args.units + unit_of(slice) + offset + slice % kPerUnit * BYTES +
               lane_of() % kChunks * 16;
    }

    __device__ __forceinline__ void begin() {
        const u64 first = unit_of(own_slice(0));
        words = args.units + first + lane_of() * 16;
#pragma unroll
        for (int s = 0; s < kOwn; ++s) {
            const int slice = own_slice(s);
            offsets[s] = unit_of(slice) - first + slice % kPerUnit * kRunBytes;
        }
        scales = group_of<kScalesOfSlice>(kValuesBytes);
        if (INT_ZEROS) zeros = group_of<kZerosOfSlice>(kValuesBytes + INT_GROUPS * kScaleBytes);
    }

    // Numbers of each group, of BYTES a slice.
    template <int BYTES>
    __device__ __forceinline__ void copy_groups(u32 to, const unsigned char* from) const {
        if (lane_of() >= kOwn * (BYTES / 16)) return;
#pragma unroll
        for (int g = 0; g < INT_GROUPS; ++g) {
            copy_16(to + g * kOwn * BYTES + lane_of() * 16, from + g * BYTES * kPerUnit);
        }
    }

    // Copies the next unit, if there is one.
    __device__ __forceinline__ void copy() {
        if (!has_unit()) return;
        const u32 to = stage();
#pragma unroll
        for (int s = 0; s < kOwn; ++s) {
            const unsigned char* from = words + offsets[s];
#pragma unroll
            for (int run = 0; run < kRuns; ++run) {
                copy_16(to + (run * kOwn + s) * kRunBytes + lane_of() * 16,
                        from + run * kRunBytes * kPerUnit);
            }
        }
        copy_groups<kScalesOfSlice>(to + kScalesAt, scales);
        if (INT_ZEROS) copy_groups<kZerosOfSlice>(to + kZerosAt, zeros);
        words += kWarpsK * kUnitBytes;
        scales += kWarpsK * kUnitBytes;
        if (INT_ZEROS) zeros += kWarpsK * kUnitBytes;
        if (advance()) begin();
    }
};

struct RowCursor : Cursor {
    const unsigned char* from;  // of this lane in the next unit

    __device__ RowCursor(const Arguments& args, u32 ring, u32 stage_bytes)
        : Cursor(args, ring, stage_bytes) {
        begin();
    }

    // 16 lanes have a row.
    __device__ __forceinline__ void begin() {
        from = args.x + static_cast<u64>(lane_of() / 16) * args.pitch +
               warp_k_of() * kUnitRowBytes + lane_of() % 16 * 16;
    }

    // Copies the rows of the next unit, if there is one.
    __device__ __forceinline__ void copy() {
        if (!has_unit()) return;
        const int row = lane_of() / 16;
        const u32 to = stage() + kWeightBytes + row * kPitch + lane_of() % 16 * 16;
#pragma unroll
        for (int n = 0; n < kMostRows; n += 2) {
            if (n + row < args.rows) copy_16(to + n * kPitch, from + n * args.pitch);
        }
        from += kWarpsK * kUnitRowBytes;
        if (advance()) begin();
    }
};

// ---- Products.

using Totals = float[kOwn][4];

// The bits of an integer below 256 are those of a number, 2^-133 (bfloat16) or 2^-24 (float16) times
// as large, and the matrix units take them as they are; those of odd registers are 16 times as large
// with 4 bits. A sum of such products and one of the rows of x alone make the sum of integers less
// their zeros. Rows in bfloat16 are multiplied by 2^90, so that sums lie far from the ends of the
// range of float32, for inputs from 2^-83 to 2^37.
constexpr u32 kEnlarged = 0x6C806C80u;
constexpr float kOverBits = kIsBf16 ? 8796093022208.0f : 16777216.0f;  // 2^43, 2^24
constexpr float kOfOdd = INT_BITS == 4 ? 16.0f : 1.0f;
constexpr u32 kOnes = 0x00010001u;

// Rows of x in the registers of a warp, for one unit of the inner dimension, and their sums.
struct Rows {
    u32 of[kSteps / 2][4];
    float sums[INT_GROUPS][2];  // of this lane's two rows in each group of inputs

    // Rows that x does not have repeat its last one: their results are not stored.
    __device__ __forceinline__ void load(u32 unit, int rows) {
        const int lane = lane_of(), row = min(lane % 8, rows - 1);
#pragma unroll
        for (int pair = 0; pair < kSteps / 2; ++pair) {
            load_matrices<false>(of[pair], unit + row * kPitch + 64 * pair + lane / 8 * 16);
            if (!kIsBf16) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                of[pair][i] = multiply_add_pair(of[pair][i], kEnlarged, kMinusZeros);
            }
        }
        add_up();
    }

    // The second operand of a step of 16 inputs.
    __device__ __forceinline__ u32 first(int step) const { return of[step / 2][step % 2 * 2]; }
    __device__ __forceinline__ u32 second(int step) const {
        return of[step / 2][step % 2 * 2 + 1];
    }

    __device__ __forceinline__ void add_up() {
        const u32 ones[4] = {kOnes, kOnes, kOnes, kOnes};
        constexpr int kOfGroup = kSteps / INT_GROUPS;
#pragma unroll
        for (int g = 0; g < INT_GROUPS; ++g) {
            float sum[4] = {};
#pragma unroll
            for (int step = g * kOfGroup; step < (g + 1) * kOfGroup; ++step) {
                multiply<kIsBf16>(sum, ones, first(step), second(step));
            }
            sums[g][0] = sum[0];
            sums[g][1] = sum[1];
        }
    }
};

// A lane's words and groups of a slice of one unit.
struct Slice {
    u32 words[kWords];
    u32 zeros[INT_GROUPS];
    float scales[INT_GROUPS][2];

    __device__ __forceinline__ void load(u32 unit, int slice) {
        const int lane = lane_of();
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            load_words(unit + (run * kOwn + slice) * kRunBytes + 16 * lane, words + 4 * run);
        }
#pragma unroll
        for (int g = 0; g < INT_GROUPS; ++g) {
            const int at = g * kOwn + slice;
            Unit::load_scales(unit + kScalesAt + at * kScalesOfSlice, lane / 4, scales[g]);
            zeros[g] = 0;
            if (INT_ZEROS) {
                zeros[g] = load_word(unit + kZerosAt + at * kZerosOfSlice + lane / 4 * 4);
            }
        }
    }
};

// The zero of one of a lane's two outputs, as large as the bits of its integers.
__device__ __forceinline__ float zero_of(u32 zeros, int output) {
    if (!INT_ZEROS) return (INT_BITS == 4 ? 8.0f : 128.0f) * (output ? kOfOdd : 1.0f);
    return static_cast<float>(output ? zeros >> 16 : zeros & 0xFFFF) * (output ? kOfOdd : 1.0f);
}

// Adds the products of one unit by a slice.
__device__ __forceinline__ void multiply_slice(const Slice& slice, const Rows& x,
                                               float (&total)[4]) {
    constexpr int kOfGroup = kSteps / INT_GROUPS;
#pragma unroll
    for (int g = 0; g < INT_GROUPS; ++g) {
        float sums[kChains][4] = {};
#pragma unroll
        for (int k = 0; k < kOfGroup; ++k) {
            const int step = g * kOfGroup + k;
            u32 a[4];
#pragma unroll
            for (int s = 0; s < 4; ++s) a[s] = integers(slice.words + step * (INT_BITS / 4), s);
            multiply<kIsBf16>(sums[k % kChains], a, x.first(step), x.second(step));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float sum = sums[0][i] + sums[1][i];
            const float zero = zero_of(slice.zeros[g], i / 2);
            total[i] = fmaf(fmaf(x.sums[g][i % 2], -zero, sum), slice.scales[g][i / 2], total[i]);
        }
    }
}

__device__ __forceinline__ void multiply_unit(u32 unit, int num_rows, Totals& totals) {
    Rows rows;
    rows.load(unit + kWeightBytes, num_rows);
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
        Slice slice;
        slice.load(unit, s);
        multiply_slice(slice, rows, totals[s]);
    }
}

// ---- Results.

// Where a lane's four sums of a slice lie, of one place along the inner dimension.
__device__ __forceinline__ u32 sums_of(u32 base, int warp, int slice) {
    return base + (((warp * kSlices + slice) * 32 + lane_of()) << 4);
}

__device__ __forceinline__ void write_totals(u32 base, const Totals& totals) {
    const int first = warp_of() % kWarpsN * kOwn;
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
        const float(&v)[4] = totals[s];
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                         sums_of(base, warp_k_of(), first + s)),
                     "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                     : "memory");
    }
}

// The sums of all warps of a slice.
__device__ __forceinline__ void add_warps(u32 base, int slice, float (&sums)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarpsK; ++warp) {
        float v[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                     : "r"(sums_of(base, warp, slice))
                     : "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += v[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] *= i < 2 ? kOverBits : kOverBits / kOfOdd;
}

// Stores 16 columns. A lane has two rows of the columns lane / 4 and lane / 4 + 8.
__device__ __forceinline__ void store(const Arguments& args, int column,
                                      const float (&sums)[4]) {
    const int lane = lane_of();
#pragma unroll
    for (int half = 0; half < 2; ++half, column += 8) {
        if (column >= args.columns) return;
        float v[2] = {sums[2 * half], sums[2 * half + 1]};
        const int own = column + lane / 4;
        if (args.bias) {
            const float bias = first_of_pair(args.bias[own]);
            v[0] += bias;
            v[1] += bias;
        }
        if (args.is_float) {
            float* out = static_cast<float*>(args.out);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int row = lane % 4 * 2 + n;
                if (row < args.rows) out[static_cast<u64>(row) * args.columns + own] = v[n];
            }
            continue;
        }
        const u32 pair = transpose_matrix(pack<kIsBf16>(v[0], v[1]));
        const int row = lane / 4;
        const u64 at = static_cast<u64>(row) * args.columns + column;
        if (row < args.rows) static_cast<u32*>(args.out)[at / 2 + lane % 4] = pair;
    }
}

__device__ __forceinline__ void store_totals(const Arguments& args, int tile, u32 base) {
    for (int slice = warp_of(); slice < kOfHalf; slice += kWarps) {
        float sums[4];
        add_warps(base, slice, sums);
        if (SKINNY_GATED) {
            float ups[4];
            add_warps(base, slice + kOfHalf, ups);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] = gated(sums[i], ups[i]);
        }
        store(args, (slice_of(args, tile) + slice) * kSliceOutputs, sums);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps, 1)
    integer_skinny(const Arguments args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 base = shared_address(memory);
    const u32 stage_bytes = kWeightBytes + args.rows * kPitch;
    const u32 ring = base + warp_of() * kStages * stage_bytes;
    let_next_kernel_start();
    WeightCursor weights(args, ring, stage_bytes);
    RowCursor rows(args, ring, stage_bytes);
#pragma unroll 1
    for (int n = 0; n < kStages; ++n) weights.copy();
    wait_for_previous_kernels();
#pragma unroll 1
    for (int n = 0; n < kStages; ++n) {
        rows.copy();
        end_copies();
    }
    const int num_units = units_of(args);
    int slot = 0;
    for (int tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
        Totals totals = {};
#pragma unroll 1
        for (int n = 0; n < num_units; ++n) {
            wait_for_copies<kStages - 1>();
            __syncwarp();
            multiply_unit(ring + slot * stage_bytes, args.rows, totals);
            __syncwarp();
            weights.copy();
            rows.copy();
            end_copies();
            if (++slot == kStages) slot = 0;
        }
        // All have read their rings, and the sums of the tile before.
        __syncthreads();
        write_totals(base + args.sums_at, totals);
        __syncthreads();
        store_totals(args, tile, base + args.sums_at);
    }
}
