// out = x @ w.T + bias, w of integers of 4 or 8 bits, on Hopper.
//
// A block multiplies 64 x INT_TILES outputs with INT_ROWS rows of x. Each of its warpgroups has 64
// outputs: it dequantizes a unit's integers in registers, which are the first operand of its
// products, while rows of x are the second operand, from shared memory. A group's sums are
// multiplied by its scales in float32. One thread copies units through a ring in shared memory,
// another thread copies rows of x. Units do not depend on the preceding kernel: the ring fills
// with them before that kernel has finished. The blocks of a cluster share work in two ways.
// `sharing` blocks have neighbouring outputs, and send each other slices of the same rows of x.
// The parts of a `split` take a part of the inner dimension each, and add up through shared memory
// in a fixed order.
//
// INT_ROWS: 8, or 16 x INT_CHUNKS. INT_TILES: 2 to 4. INT_SCALED: 1 where weights are rounded to
// x's type before they are multiplied, instead of a multiplication of sums by scales.
// GEMM_FLOAT16: x is float16 instead of bfloat16. Others: integer_units.cuh.
#include "register_products.cuh"
#include "scaled_units.cuh"

namespace {

constexpr int kThreads = 128 * INT_TILES;  // that multiply
constexpr int kOutputs = kUnitOutputs * INT_TILES;
constexpr int kPanelBytes = INT_ROWS * kRowBytes;
constexpr int kTokenBytes = kUnitInputs / kInner * kPanelBytes;
constexpr int kStageBytes = (kTokenBytes + INT_TILES * kUnitBytes + 1023) / 1024 * 1024;
constexpr int kPitch = kOutputs + 4;  // of sums, spread over the banks
constexpr int kMostStages = 16;
constexpr int kSums = INT_ROWS / 2;
// With many sums the copying threads are a warpgroup, which gives most of its registers away.
constexpr bool kMovesRegisters = INT_TILES > 1 && INT_ROWS >= 48;
constexpr int kCopiers = kMovesRegisters ? 128 : 64;
constexpr int kCopyRegisters = INT_TILES == 2 ? 40 : 32;
constexpr int kMultiplyRegisters = INT_TILES == 2 ? 232 : 160;

// Steps of 16 inputs whose fragments are made at once, and how many of these a unit has.
constexpr int kBatch = !INT_SCALED && INT_GROUPS == 4 ? 2 : 4;
constexpr int kBatches = kSteps / kBatch;

}  // namespace

struct Arguments {
    const unsigned char* units;  // [tiles of 64 outputs, inner steps, kUnitBytes]
    void* out;                   // [rows, columns], of x's type or float32
    const unsigned short* bias;  // [columns], of x's type, or null
    int rows;
    int columns;
    int inner_steps;  // units of a tile
    int unit_tiles;   // tiles of 64 outputs
    int row_tiles;
    int split_bits;  // the binary logarithm of the split
    int sharing_bits;  // that of the blocks that share rows of x
    int share;       // units of a part; the first `extra` parts have one more
    int extra;
    int stages;
    int is_float;  // whether out is float32
};

#include "unit_ring.cuh"

namespace {

// A block's tile, its part of the inner dimension and its rank among the blocks that share rows
// of x. Blocks of the same outputs lie one after another.
struct Place {
    int neighbour, part, row, tile, first, count;

    __device__ explicit Place(const Arguments& args) {
        const int rank = blockIdx.x & ((1 << (args.split_bits + args.sharing_bits)) - 1);
        const int group = blockIdx.x >> (args.split_bits + args.sharing_bits);
        neighbour = rank & ((1 << args.sharing_bits) - 1);
        part = rank >> args.sharing_bits;
        row = group % args.row_tiles;
        tile = (group / args.row_tiles << args.sharing_bits) + neighbour;
        first = args.share * part + min(part, args.extra);
        count = args.share + (part < args.extra);
    }
    // The rank in the cluster of a block that shares rows of x with this one.
    __device__ int peer(const Arguments& args, int neighbour) const {
        return (part << args.sharing_bits) + neighbour;
    }
};

__device__ __forceinline__ void copy_units(const Arguments& args, const Place& place,
                                           UnitRing ring) {
    const u64 policy = args.row_tiles == 1 ? kReadOnce : kReadAgain;
    for (int n = 0; n < place.count; ++n, ring.advance()) {
        barrier_wait(ring.released(), ring.parity ^ 1);
        barrier_arrive_expect(ring.filled(), INT_TILES * kUnitBytes);
#pragma unroll
        for (int i = 0; i < INT_TILES; ++i) {
            // Tiles beyond the last one repeat it, and store nothing.
            const int tile = min(place.tile * INT_TILES + i, args.unit_tiles - 1);
            const u64 at = static_cast<u64>(tile) * args.inner_steps + place.first + n;
            copy_bytes(ring.unit(i), args.units + at * kUnitBytes, kUnitBytes, ring.filled(),
                       policy);
        }
    }
}

// This block's slice of the rows, for all blocks that share them.
__device__ __forceinline__ void copy_rows(const Arguments& args, const Place& place,
                                          UnitRing ring, const TensorMap* map) {
    const int slice = INT_ROWS >> args.sharing_bits, offset = slice * place.neighbour;
    const u32 peers = ((1u << (1 << args.sharing_bits)) - 1) << place.peer(args, 0);
    wait_for_previous_kernels();
    for (int n = 0; n < place.count; ++n, ring.advance()) {
        barrier_wait(ring.released(), ring.parity ^ 1);
        barrier_arrive_expect(ring.filled(), kTokenBytes);
#pragma unroll
        for (int panel = 0; panel < kUnitInputs / kInner; ++panel) {
            const u32 to = ring.x() + panel * kPanelBytes + offset * kRowBytes;
            const int column = (place.first + n) * kUnitInputs + panel * kInner;
            const int row = place.row * INT_ROWS + offset;
            if (args.sharing_bits) {
                copy_box_to(to, map, ring.filled(), column, row,
                            static_cast<unsigned short>(peers), kReadByAll);
            } else {
                copy_box_2d(to, map, ring.filled(), column, row, kReadByAll);
            }
        }
    }
}

template <class UNIT>
__device__ __forceinline__ void make_batch(const UNIT& unit, int batch, u32 (&a)[kBatch][4]) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) unit.fragment(batch * kBatch + k, a[k]);
}

// Adds to the sums unless the batch is the first one.
__device__ __forceinline__ void multiply_batch(u32 x, int batch, const u32 (&a)[kBatch][4],
                                               float (&sums)[kSums], bool is_first) {
    products_fence();
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
        const int step = batch * kBatch + k;
        // A panel has four steps of 32 bytes.
        const u64 rows = operand(x + step / 4 * kPanelBytes, 16) + 2 * (step % 4);
        add_fragment_product(sums, a[k], rows, k > 0 || !is_first);
    }
    products_commit();
}

// The units of one warpgroup. While products of a batch of fragments run, the next fragments are
// made.
template <class UNIT>
struct UnitReader {
    const Arguments& args;
    const Place& place;
    const int count, tile;
    UnitRing ring;
    u32 last = 0;  // the barrier of the preceding unit
    UNIT unit;
    u32 a[2][kBatch][4];

    __device__ UnitReader(const Arguments& args, const Place& place, const UnitRing& ring)
        : args(args), place(place), count(place.count), tile(warpgroup()), ring(ring) {}

    __device__ __forceinline__ void load() {
        barrier_wait(ring.filled(), ring.parity);
        unit.load(ring.unit(tile));
    }

    __device__ __forceinline__ void begin() {
        load();
        make_batch(unit, 0, a[0]);
    }

    __device__ __forceinline__ void release() {
        __syncwarp();
        const int lane = threadIdx.x % 32;
        if (last && lane >> args.sharing_bits == 0) {
            if (args.sharing_bits) {
                barrier_arrive_at(last, place.peer(args, lane));
            } else {
                barrier_arrive(last);
            }
        }
    }
};

#if INT_SCALED
// The sums of the block's part for a warpgroup's 64 outputs, over kDivisor.
__device__ __forceinline__ void multiply_units(const Arguments& args, const Place& place,
                                               const UnitRing& ring, float (&total)[kSums]) {
    UnitReader<ScaledUnit> reader(args, place, ring);
    reader.begin();
    for (int n = 0; n < place.count; ++n) {
        const u32 x = reader.ring.x(), released = reader.ring.released();
#pragma unroll
        for (int batch = 0; batch < kBatches; ++batch) {
            multiply_batch(x, batch, reader.a[batch % 2], total, n == 0 && batch == 0);
            if (batch + 1 == kBatches) {
                // The last unit is loaded twice: a branch would end the overlap.
                if (n + 1 < place.count) reader.ring.advance();
                reader.load();
            }
            products_wait<1>();
            // The batch before this one has been multiplied.
            if (batch == 0) reader.release();
            make_batch(reader.unit, (batch + 1) % kBatches, reader.a[(batch + 1) % 2]);
        }
        reader.last = released;
    }
    products_wait<0>();
    pin(total);
}
#else
// A group's sums on their way to the total: two groups take turns if there are registers.
constexpr int kTurns = INT_ROWS > 96 ? 1 : 2;

struct Turn {
    float sums[kSums];
    float scale[2];
};

__device__ __forceinline__ void add_scaled(Turn& turn, float (&total)[kSums]) {
    pin(turn.sums);
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] += turn.sums[i] * turn.scale[i / 2 % 2];
}

// While products of a batch of fragments run, the sums before them are scaled too.
struct Multiplier : UnitReader<Unit> {
    Turn turns[kTurns];

    __device__ Multiplier(const Arguments& args, const Place& place, const UnitRing& ring)
        : UnitReader(args, place, ring) {
#pragma unroll
        for (Turn& turn : turns) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) turn.sums[i] = 0.0f;
            turn.scale[0] = turn.scale[1] = 0.0f;
        }
    }

    // Waits for the sums of the last group.
    __device__ __forceinline__ void add_last(float (&total)[kSums]) {
        Turn& turn = turns[kTurns - 1];
        products_wait<0>();
        add_scaled(turn, total);
        turn.scale[0] = turn.scale[1] = 0.0f;
    }

    // The n-th unit, whose first fragments are made. A unit beyond the last one repeats it and
    // adds nothing: a branch would end the overlap.
    template <int TURN>
    __device__ __forceinline__ void multiply(int n, float (&total)[kSums]) {
        constexpr int kOfGroup = kBatches / INT_GROUPS;
        const u32 x = ring.x(), released = ring.released();
        float scales[INT_GROUPS][2];
#pragma unroll
        for (int g = 0; g < INT_GROUPS; ++g) {
            scales[g][0] = n < count ? unit.scales[g][0] : 0.0f;
            scales[g][1] = n < count ? unit.scales[g][1] : 0.0f;
        }
#pragma unroll
        for (int batch = 0; batch < kBatches; ++batch) {
            const int group = batch / kOfGroup;
            const int turn = INT_GROUPS == 1 ? TURN : group;
            Turn& mine = turns[turn % kTurns];
            multiply_batch(x, batch, a[batch % 2], mine.sums, batch % kOfGroup == 0);
            if (batch + 1 == kBatches) {
                if (n + 1 < count) ring.advance();
                load();
            }
            products_wait<1>();
            // The batch before this one has been multiplied.
            if (batch % kOfGroup == 0) {
                if (kTurns == 2) add_scaled(turns[(turn + 1) % kTurns], total);
                mine.scale[0] = scales[group][0];
                mine.scale[1] = scales[group][1];
            }
            if (batch == 0) release();
            make_batch(unit, (batch + 1) % kBatches, a[(batch + 1) % 2]);
            if (kTurns == 1 && (batch + 1) % kOfGroup == 0) add_last(total);
        }
        last = released;
    }
};

// The sums of the block's part for a warpgroup's 64 outputs, times kStep.
__device__ __forceinline__ void multiply_units(const Arguments& args, const Place& place,
                                               const UnitRing& ring, float (&total)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] = 0.0f;
    Multiplier multiplier(args, place, ring);
    multiplier.begin();
    for (int n = 0; n < place.count; n += kTurns) {
        multiplier.multiply<0>(n, total);
        if constexpr (kTurns == 2) {
            multiplier.multiply<1>(n + 1, total);
            // The assembler would serialize products whose sums the loop reads in its next turn.
            multiplier.add_last(total);
        }
    }
}
#endif

// Sums lie as [row, output].
__device__ __forceinline__ void write_sums(u32 base, const float (&total)[kSums]) {
    const int lane = threadIdx.x % 32;
    const int output = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(base + 4 * (row * kPitch + output + i / 2 % 2 * 8)),
                     "f"(total[i] * (INT_SCALED ? kDivisor : kOverStep))
                     : "memory");
    }
}

__device__ __forceinline__ float4 load_sums(u32 address) {
    float4 sum;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(sum.x), "=f"(sum.y), "=f"(sum.z), "=f"(sum.w)
                 : "r"(address)
                 : "memory");
    return sum;
}

__device__ __forceinline__ void add(float4& sum, const float4& more) {
    sum.x += more.x;
    sum.y += more.y;
    sum.z += more.z;
    sum.w += more.w;
}

__device__ __forceinline__ float widened(unsigned short bits) {
    if (kIsBf16) return __uint_as_float(static_cast<u32>(bits) << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Four neighbouring outputs of a row.
__device__ __forceinline__ void store_outputs(const Arguments& args, int row, int output,
                                              const float4& sum) {
    float v[4] = {sum.x, sum.y, sum.z, sum.w};
    const int count = min(4, args.columns - output);
    if (args.bias) {
        for (int i = 0; i < count; ++i) v[i] += widened(args.bias[output + i]);
    }
    const u64 at = static_cast<u64>(row) * args.columns + output;
    if (args.is_float) {
        float* out = static_cast<float*>(args.out) + at;
        if (args.columns % 4 == 0) {
            *reinterpret_cast<float4*>(out) = make_float4(v[0], v[1], v[2], v[3]);
        } else {
            for (int i = 0; i < count; ++i) out[i] = v[i];
        }
        return;
    }
    unsigned short* out = static_cast<unsigned short*>(args.out) + at;
    const uint2 packed = make_uint2(pack<kIsBf16>(v[0], v[1]), pack<kIsBf16>(v[2], v[3]));
    if (args.columns % 4 == 0) {
        *reinterpret_cast<uint2*>(out) = packed;
    } else {
        const u32 words[2] = {packed.x, packed.y};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < count) out[i] = static_cast<unsigned short>(words[i / 2] >> (16 * (i % 2)));
        }
    }
}

// Adds up the parts of some outputs in their order, and stores the results.
__device__ __forceinline__ void store_part(const Arguments& args, const Place& place, u32 base) {
    const int split = 1 << args.split_bits;
    const int outputs = kOutputs >> args.split_bits, quads = outputs / 4;
    const int rows = min(INT_ROWS, args.rows - place.row * INT_ROWS);
    for (int at = threadIdx.x; at < rows * quads; at += kThreads) {
        const int row = at / quads, mine = place.part * outputs + at % quads * 4;
        const int output = place.tile * kOutputs + mine;
        if (output >= args.columns) continue;
        const u32 address = base + 4 * (row * kPitch + mine);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        // Loads of several parts are under way at once.
        constexpr int kAtOnce = 4;
        for (int first = 0; first < split; first += kAtOnce) {
            float4 more[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int owner = min(first + i, split - 1) << args.sharing_bits;
                more[i] = load_sums(address_at(address, owner + place.neighbour));
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (first + i < split) add(sum, more[i]);
            }
        }
        store_outputs(args, place.row * INT_ROWS + row, output, sum);
    }
}

// A barrier of all threads of the cluster, behind which they see each other's shared memory.
__device__ __forceinline__ void cluster_exchange() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads + kCopiers, 1)
    integer_gemm(const __grid_constant__ TensorMap map_x, const Arguments args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ __align__(8) u64 barriers[2 * kMostStages];
    const Place place(args);
    UnitRing ring{(shared_address(memory) + 1023) & ~1023u, shared_address(barriers),
                  shared_address(barriers + kMostStages), args.stages};
    if (threadIdx.x == kThreads) {
        prefetch_map(&map_x);
        for (int n = 0; n < args.stages; ++n) {
            barrier_init(ring.full + 8 * n, 2);
            barrier_init(ring.empty + 8 * n, 4 * INT_TILES << args.sharing_bits);
        }
        fence_barriers();
    }
    __syncthreads();
    // Other blocks send to this block's barriers.
    if (args.sharing_bits) cluster_sync();
    let_next_kernel_start();
    if (threadIdx.x >= kThreads) {
        if (kMovesRegisters) give_registers<kCopyRegisters>();
        if (threadIdx.x == kThreads) copy_units(args, place, ring);
        if (threadIdx.x == kThreads + 32) copy_rows(args, place, ring, &map_x);
        __syncwarp();
        cluster_exchange();
    } else {
        if (kMovesRegisters) take_registers<kMultiplyRegisters>();
        float total[kSums];
        multiply_units(args, place, ring, total);
        // The ring has been read: sums may overwrite it.
        named_wait(1, kThreads);
        write_sums(ring.tiles, total);
        cluster_exchange();
        store_part(args, place, ring.tiles);
    }
    // Other blocks have read this block's sums.
    cluster_exchange();
}
