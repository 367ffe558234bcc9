// residual += the sum of x over the ranks of a tensor group; output = RMS norm of residual, one
// block a row, in one launch on every rank.
//
// Each rank has a region that all ranks map: two slots, each with the rows of every rank. Block
// t pushes its rank's row t to every other rank, as words of 8 bytes: 4 bytes of the row, and
// the epoch, which counts the launches that had a row t. Each thread then polls its own rank's
// region until all of its words carry the epoch. A word arrives whole, so a row crosses the
// link once, without a fence, flag or barrier. (NCCL's protocol LL uses such words.)
//
// Row t is a channel of its own, with its own words and its own epoch. Launches of t rows or
// fewer leave both unchanged on all ranks, so the number of rows may change from launch to
// launch.
//
// Two slots, alternating by the epoch's parity, suffice. Rank A pushes row t of epoch e + 2
// over that of epoch e in rank B's region. A does so after wait_for_previous_kernels, so A's
// own launch of epoch e + 1 has ended, and that launch had seen B's words of e + 1. B had
// pushed these words after its own wait, when B's launch of epoch e, and all its reads of epoch
// e, had ended. Kernels that begin before their predecessor has ended do not change this
// argument: before their wait they touch neither the region nor the epoch. (A wait covers all
// earlier kernels, since each of them has waited before it ended.)
//
// Epochs wrap around after 2^32 launches, which takes days. A stale word could be mistaken only
// if it had not been written for exactly that many launches of its row. But every launch of a
// row writes all words that later launches of equal width read. The word found is therefore two
// epochs old, or older than the first launch of that width: zero, or the check at the start.
//
// Thread i has the 16 bytes of chunk i + c * threads of row t for each c below ROW_CHUNKS.
// Triton's norm kernel gives a thread NORM_VALUES elements, and the next thread the following
// ones: a chunk holds the elements of one or several neighbouring Triton threads. The squares
// of each Triton thread are summed separately and then combined in Triton's order: the norm is
// equal bit by bit.
//
// ELEMENT_BYTES: 2 for bfloat16, or with ELEMENT_FLOAT16 for float16; 4 for float32. RANKS: the
// size of the group.
#ifndef SUM_NORM_PRIMITIVES
#include "cluster.cuh"
#endif

namespace {

constexpr int kChunk = 16 / ELEMENT_BYTES;
constexpr int kElements = kChunk * ROW_CHUNKS;
constexpr int kMaxThreads = 512;
constexpr int kShares = kChunk / NORM_VALUES;  // of a chunk
constexpr int kMaxNormWarps = 32;

static_assert(ROW_CHUNKS > 0, "a thread has at least a chunk of 16 bytes");
static_assert(kShares > 0 && kShares * NORM_VALUES == kChunk, "a share lies in one chunk");

struct alignas(16) Quad {
    u32 words[4];
};

struct Arguments {
    u64 regions[RANKS];  // address of each rank's region as mapped here
    const void* x;  // [rows, width]; or float32 [parts, rows, width], which are added up
    void* residual;
    const void* weight;
    void* output;
    u32* launches;  // of each row, so far
    long long part_stride, x_stride, residual_stride;  // in elements
    int parts;  // 0: x has no float32 parts
    int width;                                         // a multiple of the chunk
    int rank;
    int max_rows;  // of one rank's rows in a slot
    int row_words;  // of a row in it
    float eps;
};

#ifndef SUM_NORM_PRIMITIVES
// ---- Differences when the source is compiled for a test on a CPU.

__device__ __forceinline__ void store_words(u64* place, u64 first, u64 second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(place), "l"(first),
                 "l"(second)
                 : "memory");
}

__device__ __forceinline__ void load_words(const u64* place, u64& first, u64& second) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(first), "=l"(second)
                 : "l"(place)
                 : "memory");
}

__device__ __forceinline__ float bits_float(u32 bits) { return __uint_as_float(bits); }

__device__ __forceinline__ u32 float_bits(float value) { return __float_as_uint(value); }

// Two elements of two bytes each, rounded to nearest even.
__device__ __forceinline__ u32 pack_pair(float low, float high) {
    u32 pair;
#ifdef ELEMENT_FLOAT16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

__device__ __forceinline__ void unpack_pair(u32 pair, float& low, float& high) {
#ifdef ELEMENT_FLOAT16
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(low), "=f"(high)
        : "r"(pair));
#else
    low = bits_float(pair << 16);
    high = bits_float(pair & 0xffff0000u);
#endif
}

// 1 / sqrt(sum / count + eps), by Triton's approximations. The addition specifies no rounding,
// as in Triton: the assembler then fuses it with the division's last product.
__device__ __forceinline__ float inverse_root(float sum, float count, float eps) {
    float mean, padded, root;
    asm("div.full.f32 %0, %1, %2;" : "=f"(mean) : "f"(sum), "f"(count));
    asm("add.f32 %0, %1, %2;" : "=f"(padded) : "f"(mean), "f"(eps));
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(padded));
    return root;
}

// Shared memory of this thread block: a sum of each warp.
__device__ __forceinline__ float* shared_sums() {
    __shared__ float sums[kMaxNormWarps];
    return sums;
}
#endif

// ---- Chunks of a row, in memory and as numbers.

__device__ __forceinline__ void unpack(const Quad& chunk, float* values) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (ELEMENT_BYTES == 4) {
            values[i] = bits_float(chunk.words[i]);
        } else {
            unpack_pair(chunk.words[i], values[2 * i], values[2 * i + 1]);
        }
    }
}

__device__ __forceinline__ Quad pack(const float* values) {
    Quad chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        chunk.words[i] = ELEMENT_BYTES == 4 ? float_bits(values[i])
                                            : pack_pair(values[2 * i], values[2 * i + 1]);
    }
    return chunk;
}

// The offsets of this thread's chunks, in elements; chunks beyond the width are zeros.
struct Places {
    int width;

    __device__ __forceinline__ int dim(int chunk) const {
        return kChunk * (threadIdx.x + chunk * blockDim.x);
    }

    __device__ __forceinline__ bool has(int chunk) const { return dim(chunk) < width; }

    __device__ __forceinline__ Quad load(const void* row, int chunk) const {
        if (!has(chunk)) return Quad{};
        return *reinterpret_cast<const Quad*>(static_cast<const char*>(row) +
                                              ELEMENT_BYTES * dim(chunk));
    }

    __device__ __forceinline__ void store(void* row, int chunk, const Quad& values) const {
        if (!has(chunk)) return;
        *reinterpret_cast<Quad*>(static_cast<char*>(row) + ELEMENT_BYTES * dim(chunk)) = values;
    }

    // The offset of two of the chunk's four words in a row of a region: adjacent to those of
    // the next thread.
    __device__ __forceinline__ int word(int chunk, int half) const {
        return 2 * ((2 * chunk + half) * blockDim.x + threadIdx.x);
    }
};

// A row of float32 parts, added up. PARTS: their number, all read at once; or 0 for any number.
template <int PARTS>
__device__ __forceinline__ void add_parts(const Arguments& args, const Places& places,
                                          const float* row, float (&sums)[kElements]) {
    const int parts = PARTS ? PARTS : args.parts;
#pragma unroll(PARTS ? PARTS : 1)
    for (int part = 0; part < parts; ++part) {
#pragma unroll
        for (int i = 0; i < kElements; i += 4) {
            const int c = i / kChunk;
            Quad four{};
            if (places.has(c)) {
                const float* from = row + part * args.part_stride + places.dim(c) + i % kChunk;
                four = *reinterpret_cast<const Quad*>(from);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float value = bits_float(four.words[k]);
                sums[i + k] = part == 0 ? value : sums[i + k] + value;
            }
        }
    }
}

// This rank's addend, rounded as the product without parts would be.
__device__ __forceinline__ void load_addend(const Arguments& args, const Places& places,
                                            long long row, Quad (&own)[ROW_CHUNKS]) {
    if (args.parts == 0) {
        const char* line =
            static_cast<const char*>(args.x) + ELEMENT_BYTES * row * args.x_stride;
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; ++c) own[c] = places.load(line, c);
        return;
    }
    const float* line = static_cast<const float*>(args.x) + row * args.x_stride;
    float sums[kElements];
    switch (args.parts) {
        case 2: add_parts<2>(args, places, line, sums); break;
        case 4: add_parts<4>(args, places, line, sums); break;
        default: add_parts<0>(args, places, line, sums);
    }
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) own[c] = pack(sums + c * kChunk);
}

__device__ __forceinline__ void push(u64* row, const Places& places, u32 epoch,
                                     const Quad (&own)[ROW_CHUNKS]) {
    const u64 tag = static_cast<u64>(epoch) << 32;
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
        if (!places.has(c)) continue;
        store_words(row + places.word(c, 0), tag | own[c].words[0], tag | own[c].words[1]);
        store_words(row + places.word(c, 1), tag | own[c].words[2], tag | own[c].words[3]);
    }
}

// Another rank's row, once all of its words have arrived.
__device__ __forceinline__ void await(const u64* row, const Places& places, u32 epoch,
                                      Quad (&found)[ROW_CHUNKS]) {
    bool is_there;
    do {
        u32 difference = 0;
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; ++c) {
            found[c] = Quad{};
            if (!places.has(c)) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u64 first, second;
                load_words(row + places.word(c, half), first, second);
                difference |= static_cast<u32>(first >> 32) ^ epoch;
                difference |= static_cast<u32>(second >> 32) ^ epoch;
                found[c].words[2 * half] = static_cast<u32>(first);
                found[c].words[2 * half + 1] = static_cast<u32>(second);
            }
        }
        is_there = difference == 0;
    } while (!is_there);
}

__device__ __forceinline__ void add(const Quad (&row)[ROW_CHUNKS], float (&total)[kElements]) {
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
        float values[kChunk];
        unpack(row[c], values);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) total[c * kChunk + i] += values[i];
    }
}

// The sum over the ranks in their order, in float32; `own` is this rank's addend.
__device__ __forceinline__ void sum_ranks(const Arguments& args, const Places& places,
                                          int row, u32 epoch, const Quad (&own)[ROW_CHUNKS],
                                          float (&total)[kElements]) {
    const long long place = static_cast<long long>(args.max_rows) * args.row_words;
    const long long slot =
        (epoch & 1) * RANKS * place + static_cast<long long>(row) * args.row_words;
    // Each rank begins with another peer, so that not all ranks use one link at once.
#pragma unroll
    for (int step = 1; step < RANKS; ++step) {
        const int to = (args.rank + step) % RANKS;
        u64* theirs = reinterpret_cast<u64*>(args.regions[to]);
        push(theirs + slot + args.rank * place, places, epoch, own);
    }
    const u64* mine = reinterpret_cast<const u64*>(args.regions[args.rank]) + slot;
#pragma unroll
    for (int from = 0; from < RANKS; ++from) {
        if (from == args.rank) {
            add(own, total);
        } else {
            Quad found[ROW_CHUNKS];
            await(mine + from * place, places, epoch, found);
            add(found, total);
        }
    }
}

// The sum rounded as by a separate kernel, and added to the residual, rounded again.
__device__ __forceinline__ void add_to_residual(const Quad (&before)[ROW_CHUNKS],
                                                float (&values)[kElements],
                                                Quad (&after)[ROW_CHUNKS]) {
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
        float sums[kChunk], added[kChunk];
        unpack(pack(values + c * kChunk), sums);
        unpack(before[c], added);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sums[i] += added[i];
        after[c] = pack(sums);
        unpack(after[c], values + c * kChunk);
    }
}

// ---- The sum of the squares of a row, in Triton's order.

__device__ __forceinline__ float sum_of_squares(const float* share) {
    float sum = fmaf(share[0], share[0], share[1] * share[1]);
#pragma unroll
    for (int i = 2; i < NORM_VALUES; ++i) sum = fmaf(share[i], share[i], sum);
    return sum;
}

__device__ __forceinline__ float from_lane(float value, int far) {
    return __shfl_xor_sync(0xffffffffu, value, far);
}

// Triton's warps add up their threads' sums, first those 16 apart, last neighbours; then one
// warp adds up the warps' sums in the same way. When one thread returns, all threads have
// arrived here.
__device__ __forceinline__ float add_over_row(const float (&values)[kElements]) {
    constexpr int kLanes = 32 / kShares;  // that do the work of one of Triton's warps
    constexpr int kSums = kShares * ROW_CHUNKS;
    float own[kSums];
#pragma unroll
    for (int n = 0; n < kSums; ++n) own[n] = sum_of_squares(values + n * NORM_VALUES);
#pragma unroll
    for (int far = kLanes / 2; far > 0; far /= 2) {
#pragma unroll
        for (int n = 0; n < kSums; ++n) own[n] += from_lane(own[n], far);
    }
    float* sums = shared_sums();
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
        float* shares = own + c * kShares;
#pragma unroll
        for (int far = kShares / 2; far > 0; far /= 2) {
#pragma unroll
            for (int n = 0; n < far; ++n) shares[n] += shares[n + far];
        }
        const int chunk = threadIdx.x + c * blockDim.x;
        if (chunk % kLanes == 0) sums[chunk / kLanes] = shares[0];
    }
    __syncthreads();
    const int warps = ROW_CHUNKS * blockDim.x / kLanes;
    float sum = sums[threadIdx.x % 32 % warps];
    for (int far = warps / 2; far > 0; far /= 2) sum += from_lane(sum, far);
    return sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    sum_norm(const __grid_constant__ Arguments args) {
    const int row = blockIdx.x;
    const Places places{args.width};
    let_next_kernel_start();
    Quad weight[ROW_CHUNKS], before[ROW_CHUNKS], own[ROW_CHUNKS], after[ROW_CHUNKS];
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) weight[c] = places.load(args.weight, c);
    wait_for_previous_kernels();
    const u32 epoch = args.launches[row] + 1;
    char* residual =
        static_cast<char*>(args.residual) + ELEMENT_BYTES * row * args.residual_stride;
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) before[c] = places.load(residual, c);
    load_addend(args, places, row, own);
    float values[kElements] = {};
    sum_ranks(args, places, row, epoch, own, values);
    add_to_residual(before, values, after);
    const float sum = add_over_row(values);
    // All threads have read the epoch.
    if (threadIdx.x == 0) args.launches[row] = epoch;
    const float scale = inverse_root(sum, static_cast<float>(args.width), args.eps);
    char* output = static_cast<char*>(args.output) +
                   ELEMENT_BYTES * static_cast<long long>(row) * args.width;
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; ++c) {
        float scales[kChunk];
        unpack(weight[c], scales);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) scales[i] = scale * scales[i] * values[c * kChunk + i];
        places.store(residual, c, after[c]);
        places.store(output, c, pack(scales));
    }
}
