// out = x @ w.T for few to some hundred rows of x, or SwiGLU of it, on Hopper.
//
// A block multiplies GEMM_MI x GEMM_WARPGROUPS x 64 rows of x with 16 x GEMM_CHUNKS rows of w.
// One thread copies tiles through a ring of GEMM_STAGES in shared memory; the warpgroups multiply.
// The blocks of a cluster share work in two ways: `split` of them take a part of the inner
// dimension each and add up through shared memory in a fixed order; `sharing` of them take
// neighbouring rows of w and send each other slices of the same rows of x.
// Weights do not depend on the kernel before: the ring fills with them before it has finished.
//
// GEMM_SPLIT: 1 for `split` above 1 in a cluster, which then has one group of tiles.
// GEMM_PARTS: the parts of the inner dimension are not added up: out is float32 [split, rows,
// pitch], and its parts are work of their own rather than blocks of a cluster.
// GEMM_GATED: w holds gate rows above as many up rows; out = silu(x @ gate.T) * (x @ up.T).
// GEMM_FLOAT16: float16 instead of bfloat16.
#include "cluster.cuh"
#include "wide_product.cuh"

namespace {

constexpr int kColumns = 16 * GEMM_CHUNKS;
constexpr int kRows = 64 * GEMM_MI * GEMM_WARPGROUPS;
constexpr int kInner = 64;
constexpr int kRowBytes = 2 * kInner;
constexpr int kTileX = kRows * kRowBytes;
constexpr int kTileW = kColumns * kRowBytes;
constexpr int kStageBytes = kTileX + kTileW;
constexpr int kSums = kColumns / 2;
constexpr int kMultipliers = 128 * GEMM_WARPGROUPS;
// Registers a thread: most of the file go from the copying warpgroup to the multiplying ones.
constexpr int kCopyRegisters = GEMM_WARPGROUPS == 2 ? 40 : 32;
constexpr int kMultiplyRegisters = GEMM_WARPGROUPS == 2 ? 232 : 160;
#ifdef GEMM_FLOAT16
constexpr bool kIsBf16 = false;
#else
constexpr bool kIsBf16 = true;
#endif
#ifdef GEMM_GATED
constexpr bool kIsGated = true;
#else
constexpr bool kIsGated = false;
#endif
constexpr int kOutColumns = kIsGated ? kColumns / 2 : kColumns;

__device__ __forceinline__ float gated(float gate, float up) {
    return gate / (1.0f + __expf(-gate)) * up;
}

}  // namespace

struct Arguments {
    u32* out;        // [rows, pitch], two values a word; or float32 parts
    int rows;        // of x
    int columns;     // of out
    int pitch;       // of rows of out: columns, rounded up to a multiple of 8
    int inner_steps; // the inner dimension in steps of 64, rounded up
    int row_tiles;
    int groups;      // row tiles x groups of `sharing` column tiles (x parts)
    int split;       // blocks of a cluster, or parts, that share the inner dimension
    int sharing;     // blocks of a cluster that share rows of x
    int slice;       // rows of x that each of these copies; rows beyond them are not read
    u64 hint_w;      // cache policy of weights
};

namespace {

// Where a block stands in its cluster, and the cluster among others.
struct Place {
    int part, neighbour, cluster, num_clusters;

    __device__ explicit Place(const Arguments& args) {
        const int size = args.sharing * (GEMM_PARTS ? 1 : args.split);
        const int rank = size > 1 ? static_cast<int>(cluster_rank()) : 0;
        part = rank / args.sharing;
        neighbour = rank % args.sharing;
        cluster = blockIdx.x / size;
        num_clusters = gridDim.x / size;
    }
};

// The tile of a group that falls to a block, and its part of the inner dimension. Rows go in
// bands that stay in the cache while all weights pass; within a band, blocks that run together
// have the same weights.
struct Tile {
    int row, column, part, first_step, num_steps;

    __device__ Tile(const Arguments& args, const Place& place, int group) {
        constexpr int kBand = 8;
        int num_groups = args.groups;
        part = place.part;
        if (GEMM_PARTS) {
            part = group % args.split;
            group /= args.split;
            num_groups /= args.split;
        }
        first_step = args.inner_steps * part / args.split;
        num_steps = args.inner_steps * (part + 1) / args.split - first_step;
        const int column_groups = num_groups / args.row_tiles;
        const int band = group / (kBand * column_groups);
        const int height = min(kBand, args.row_tiles - band * kBand);
        const int at = group - band * kBand * column_groups;
        row = band * kBand + at % height;
        column = at / height * args.sharing + place.neighbour;
    }
};

struct Ring {
    u32 tiles, full, empty;
    int stage = 0;
    u32 parity = 0;

    __device__ u32 x() const { return tiles + stage * kStageBytes; }
    __device__ u32 w() const { return x() + kTileX; }
    __device__ u32 filled() const { return full + 8 * stage; }
    __device__ u32 released() const { return empty + 8 * stage; }
    __device__ void advance() {
        if (++stage == GEMM_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void copy_weights(const Arguments& args, const Ring& ring,
                                             const TensorMap* map, int step, int column_tile) {
    const int first = column_tile * kOutColumns;
    copy_box_2d(ring.w(), map, ring.filled(), step * kInner, first, args.hint_w);
    if (kIsGated) {
        copy_box_2d(ring.w() + kTileW / 2, map, ring.filled(), step * kInner,
                  args.columns + first, args.hint_w);
    }
}

__device__ __forceinline__ void copy_rows(const Arguments& args, const Ring& ring,
                                          const Place& place, const TensorMap* map, int step,
                                          int row_tile) {
    constexpr u64 kKeep = 0x14F0000000000000ull;
    const int first = row_tile * kRows + place.neighbour * args.slice;
    const u32 target = ring.x() + place.neighbour * args.slice * kRowBytes;
    if (args.sharing == 1) {
        copy_box_2d(target, map, ring.filled(), step * kInner, first, kKeep);
    } else {
        const u32 peers = ((1u << args.sharing) - 1) << (place.part * args.sharing);
        copy_box_to(target, map, ring.filled(), step * kInner, first,
                     static_cast<unsigned short>(peers), kKeep);
    }
}

// The copying warpgroup's work: one thread of it keeps the ring full.
__device__ __forceinline__ void fill_ring(const Arguments& args, const Place& place, Ring ring,
                                          const TensorMap* map_x, const TensorMap* map_w) {
    // The first tile's weights go ahead; rows of x must wait for the kernel that makes them.
    const u32 bytes = args.slice * args.sharing * kRowBytes + kTileW;
    int group = place.cluster;
    const Tile first(args, place, group);
    const int ahead = min(first.num_steps, GEMM_STAGES);
    Ring early = ring;
    for (int n = 0; n < ahead && group < args.groups; ++n, early.advance()) {
        barrier_arrive_expect(early.filled(), bytes);
        copy_weights(args, early, map_w, first.first_step + n, first.column);
    }
    wait_for_previous_kernels();
    int num_early = ahead;
    for (; group < args.groups; group += place.num_clusters) {
        const Tile tile(args, place, group);
        for (int n = 0; n < tile.num_steps; ++n, ring.advance()) {
            const int step = tile.first_step + n;
            if (num_early > 0) {
                --num_early;
            } else {
                barrier_wait(ring.released(), ring.parity ^ 1);
                barrier_arrive_expect(ring.filled(), bytes);
                copy_weights(args, ring, map_w, step, tile.column);
            }
            copy_rows(args, ring, place, map_x, step, tile.row);
        }
    }
    // Neighbours may reach into this block's shared memory until all stages are released.
    for (int n = 0; n < GEMM_STAGES; ++n, ring.advance()) {
        barrier_wait(ring.released(), ring.parity ^ 1);
    }
}

// Tells every block that sends to this one that a stage has been read.
__device__ __forceinline__ void release(const Arguments& args, const Place& place,
                                        u32 barrier) {
    const int lane = threadIdx.x % 128;
    if (args.sharing == 1) {
        if (lane == 0) barrier_arrive(barrier);
    } else if (lane < args.sharing) {
        barrier_arrive_at(barrier, place.part * args.sharing + lane);
    }
}

__device__ __forceinline__ void multiply_tile(const Arguments& args, const Place& place,
                                              Ring& ring, int num_steps,
                                              float (&sums)[GEMM_MI][kSums]) {
    const int warpgroup = threadIdx.x / 128;
    u32 last = 0;
#pragma unroll
    for (int i = 0; i < GEMM_MI; ++i) {
#pragma unroll
        for (int n = 0; n < kSums; ++n) sums[i][n] = 0.0f;
    }
    for (int n = 0; n < num_steps; ++n, ring.advance()) {
        barrier_wait(ring.filled(), ring.parity);
        const u64 x = operand(ring.x() + warpgroup * GEMM_MI * 64 * kRowBytes, 16);
        const u64 w = operand(ring.w(), 16);
        products_fence();
#pragma unroll
        for (int k = 0; k < kInner / 16; ++k) {
#pragma unroll
            for (int i = 0; i < GEMM_MI; ++i) {
                add_wide_product(sums[i], x + i * (64 * kRowBytes / 16) + 2 * k, w + 2 * k);
            }
        }
        products_commit();
        products_wait<1>();
        if (n > 0) release(args, place, last);
        last = ring.released();
    }
    products_wait<0>();
    release(args, place, last);
}

#if !GEMM_SPLIT && !GEMM_PARTS
// Four words of each of four lanes, transposed: 16 consecutive bytes of a row for each lane.
__device__ __forceinline__ void transpose_quad(u32 (&v)[4]) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int far = 1; far < 4; far *= 2) {
        const bool is_upper = lane & far;
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            if (a & far) continue;
            const u32 sent = is_upper ? v[a] : v[a + far];
            const u32 received = __shfl_xor_sync(0xffffffffu, sent, far);
            if (is_upper) {
                v[a] = received;
            } else {
                v[a + far] = received;
            }
        }
    }
}

// Two neighbouring results of row `lane / 4 + 8 * half`, of the eight columns `tile`.
__device__ __forceinline__ u32 result(const float (&sums)[kSums], int tile, int half) {
    const int at = 4 * tile + 2 * half;
    if (!kIsGated) return pack<kIsBf16>(sums[at], sums[at + 1]);
    constexpr int kUp = kSums / 2;
    return pack<kIsBf16>(gated(sums[at], sums[(at + kUp) % kSums]),
                gated(sums[at + 1], sums[(at + kUp + 1) % kSums]));
}

__device__ __forceinline__ void store_tile(const Arguments& args, int row_tile,
                                           int column_tile, const float (&sums)[GEMM_MI][kSums]) {
    constexpr int kTiles = kOutColumns / 8;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int columns = args.columns - column_tile * kOutColumns;
#pragma unroll
    for (int part = 0; part < 2 * GEMM_MI; ++part) {
        const int i = part / 2, half = part % 2;
        const int row = row_tile * kRows + (threadIdx.x / 128 * GEMM_MI + i) * 64 + warp * 16 +
                        8 * half + lane / 4;
        const bool is_inside = row < args.rows;
        u32* out = args.out + (static_cast<long long>(row) * args.pitch +
                               column_tile * kOutColumns) / 2;
#pragma unroll
        for (int tile = 0; tile + 4 <= kTiles; tile += 4) {
            u32 v[4] = {result(sums[i], tile, half), result(sums[i], tile + 1, half),
                        result(sums[i], tile + 2, half), result(sums[i], tile + 3, half)};
            transpose_quad(v);
            const int column = 8 * (tile + lane % 4);
            if (is_inside && column < columns) {
                *reinterpret_cast<uint4*>(out + column / 2) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
#pragma unroll
        for (int tile = kTiles / 4 * 4; tile < kTiles; ++tile) {
            const u32 value = result(sums[i], tile, half);
            if (is_inside && 8 * tile < columns) out[4 * tile + lane % 4] = value;
        }
    }
}
#elif GEMM_SPLIT
constexpr int kUp = kIsGated ? 2 : 1;  // sums of the product for a result

// The sums that pass between the parts of a tile: each part adds up those of a run of column
// tiles of eight. A block holds `rows` rows of the sums for one part; its pitch spreads rows
// over the banks. The sums made here lie in front, those received behind them.
struct Exchange {
    u32 base, arrived;
    int rows, pitch, split, part;

    __device__ Exchange(const Arguments& args, const Place& place, const Ring& ring, int row_tile,
                        u32 arrived)
        : base(ring.tiles), arrived(arrived), split(args.split), part(place.part) {
        const int most = (kOutColumns / 8 + split - 1) / split;
        rows = min(kRows, args.rows - row_tile * kRows);
        pitch = 8 * (kUp * most | 1);
    }
    __device__ int first_tile(int owner) const { return kOutColumns / 8 * owner / split; }
    __device__ u32 block_bytes() const { return 4 * rows * pitch; }
    __device__ u32 made_for(int owner) const { return base + owner * block_bytes(); }
    // Where `owner` finds what part `from` made.
    __device__ u32 found(int owner, int from) const {
        if (from == owner) return made_for(owner);
        return base + (split + from - (from > owner)) * block_bytes();
    }
};

__device__ __forceinline__ void write_sums(const Exchange& exchange,
                                           const float (&sums)[GEMM_MI][kSums]) {
    constexpr int kTiles = kOutColumns / 8;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2 * GEMM_MI; ++half) {
        const int i = half / 2;
        const int row = (threadIdx.x / 128 * GEMM_MI + i) * 64 + warp * 16 + 8 * (half % 2) +
                        lane / 4;
        if (row >= exchange.rows) continue;
        // Divisions are dear: once for each owner, not for each tile.
        int owner = 0, next = exchange.first_tile(1), count = next;
        u32 target = exchange.base + 4 * row * exchange.pitch + 8 * (lane % 4);
        u32 owner_target = target;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile, target += 32) {
            if (tile == next) {
                ++owner;
                next = exchange.first_tile(owner + 1);
                count = next - tile;
                owner_target += exchange.block_bytes();
                target = owner_target;
            }
#pragma unroll
            for (int up = 0; up < kUp; ++up) {
                const float* sum = &sums[i][4 * (tile + up * kTiles) + 2 * (half % 2)];
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target + 32 * up * count),
                             "f"(sum[0]), "f"(sum[1])
                             : "memory");
            }
        }
    }
}

// The sum over the parts, in their order.
__device__ __forceinline__ float4 add_parts(const Exchange& exchange, u32 within) {
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int from = 0; from < exchange.split; ++from) {
        float4 more;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(more.x), "=f"(more.y), "=f"(more.z), "=f"(more.w)
                     : "r"(exchange.found(exchange.part, from) + within)
                     : "memory");
        total.x += more.x;
        total.y += more.y;
        total.z += more.z;
        total.w += more.w;
    }
    return total;
}

// Adds up and stores the columns that fall to this part.
__device__ __forceinline__ void store_sums(const Arguments& args, const Exchange& exchange,
                                           const Tile& tile) {
    const int first = exchange.first_tile(exchange.part);
    const int units = 2 * (exchange.first_tile(exchange.part + 1) - first);
    for (int unit = threadIdx.x; unit < exchange.rows * units; unit += kMultipliers) {
        const int row = unit / units, column = unit % units * 4;
        const u32 within = 4 * (row * exchange.pitch + column);
        float4 sum = add_parts(exchange, within);
        if (kIsGated) {
            const float4 up = add_parts(exchange, within + 16 * units);
            sum = make_float4(gated(sum.x, up.x), gated(sum.y, up.y), gated(sum.z, up.z),
                              gated(sum.w, up.w));
        }
        const int out_column = tile.column * kOutColumns + 8 * first + column;
        if (out_column >= args.columns) continue;
        const long long at =
            static_cast<long long>(tile.row * kRows + row) * args.pitch + out_column;
        *reinterpret_cast<uint2*>(args.out + at / 2) =
            make_uint2(pack<kIsBf16>(sum.x, sum.y), pack<kIsBf16>(sum.z, sum.w));
    }
}

// Adds up the parts' sums through shared memory: every block those of some columns.
__device__ __forceinline__ void reduce_tile(const Arguments& args, const Place& place,
                                            const Exchange& exchange,
                                            const float (&sums)[GEMM_MI][kSums],
                                            const Tile& tile) {
    const u32 bytes = exchange.block_bytes();
    if (threadIdx.x == 0) barrier_arrive_expect(exchange.arrived, (args.split - 1) * bytes);
    // The ring has been read: sums may take its place.
    named_wait(1, kMultipliers);
    write_sums(exchange, sums);
    fence_shared_for_async();
    named_wait(1, kMultipliers);
    // The other blocks have read theirs too, and may be sent sums.
    cluster_sync();
    const int owner = threadIdx.x;
    if (owner < args.split && owner != place.part) {
        const int rank = owner * args.sharing + place.neighbour;
        send_bytes(address_at(exchange.found(owner, place.part), rank),
                   exchange.made_for(owner), bytes, address_at(exchange.arrived, rank));
    }
    __syncwarp();
    barrier_wait(exchange.arrived, 0);
    store_sums(args, exchange, tile);
    // What was sent from here has come where it goes.
    cluster_sync();
}
#else
// Stores the float32 sums of a part: whole sectors of 32 bytes by four lanes.
__device__ __forceinline__ void store_part(const Arguments& args, const Tile& tile,
                                           const float (&sums)[GEMM_MI][kSums]) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int columns = args.columns - tile.column * kColumns;
#pragma unroll
    for (int half = 0; half < 2 * GEMM_MI; ++half) {
        const int i = half / 2;
        const int row = tile.row * kRows + (threadIdx.x / 128 * GEMM_MI + i) * 64 + warp * 16 +
                        8 * (half % 2) + lane / 4;
        if (row >= args.rows) continue;
        const long long line = static_cast<long long>(tile.part) * args.rows + row;
        float* out = reinterpret_cast<float*>(args.out) + line * args.pitch +
                     tile.column * kColumns + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
            const float* sum = &sums[i][4 * n + 2 * (half % 2)];
            if (8 * n < columns) {
                *reinterpret_cast<float2*>(out + 8 * n) = make_float2(sum[0], sum[1]);
            }
        }
    }
}
#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(kMultipliers + 128, 1)
    gemm(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_w,
         const Arguments args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ __align__(8) u64 barriers[2 * GEMM_STAGES + 1];
    const Place place(args);
    const bool is_cluster = args.sharing > 1 || GEMM_SPLIT;
    Ring ring{(shared_address(memory) + 1023) & ~1023u, shared_address(barriers),
              shared_address(barriers + GEMM_STAGES)};
    if (threadIdx.x == kMultipliers) {
        prefetch_map(&map_x);
        prefetch_map(&map_w);
        for (int n = 0; n < GEMM_STAGES; ++n) {
            barrier_init(ring.full + 8 * n, 1);
            barrier_init(ring.empty + 8 * n, GEMM_WARPGROUPS * args.sharing);
        }
        barrier_init(shared_address(barriers + 2 * GEMM_STAGES), 1);
        fence_barriers();
    }
    __syncthreads();
    if (is_cluster) cluster_sync();
    let_next_kernel_start();
    if (threadIdx.x >= kMultipliers) {
        if (GEMM_WARPGROUPS > 1) give_registers<kCopyRegisters>();
        if (threadIdx.x == kMultipliers) fill_ring(args, place, ring, &map_x, &map_w);
        __syncwarp();
#if GEMM_SPLIT
        cluster_sync();
        cluster_sync();
#endif
    } else {
        if (GEMM_WARPGROUPS > 1) take_registers<kMultiplyRegisters>();
        float sums[GEMM_MI][kSums];
        for (int group = place.cluster; group < args.groups; group += place.num_clusters) {
            const Tile tile(args, place, group);
            multiply_tile(args, place, ring, tile.num_steps, sums);
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
