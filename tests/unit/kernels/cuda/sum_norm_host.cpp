// kernels/cuda/csrc/sum_norm.cu on a CPU: threads for the kernel's, in warps that exchange values,
// streams that let a kernel begin before its predecessor has ended, and ranks that run apart.
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

using u32 = unsigned int;
using u64 = unsigned long long;

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define SUM_NORM_PRIMITIVES

namespace {

struct Index {
    int x;
};

constexpr int kWarp = 32;

struct Warp {
    std::barrier<> barrier{kWarp};
    float values[2][kWarp];
};

struct Block {
    explicit Block(int threads) : barrier(threads), warps(threads / kWarp) {}

    std::barrier<> barrier;
    std::vector<Warp> warps;
    float sums[kWarp];
    float sum;  // that the norm was made of
};

// One launch of one rank.
struct Launch {
    Launch(Launch* previous, int blocks, int threads)
        : previous(previous), running(blocks * threads), unstarted(blocks * threads) {
        for (int n = 0; n < blocks; ++n) this->blocks.push_back(std::make_unique<Block>(threads));
    }

    Launch* previous;
    std::atomic<int> running, unstarted;
    std::vector<std::unique_ptr<Block>> blocks;
};

thread_local Index threadIdx, blockIdx, blockDim;
thread_local Launch* launch;
thread_local int num_exchanges;
thread_local std::minstd_rand chance;

// Lets others go ahead now and then, for a while that differs.
void dawdle() {
    const auto drawn = chance() % 64;
    if (drawn == 0) std::this_thread::sleep_for(std::chrono::microseconds(chance() % 200));
    if (drawn < 8) std::this_thread::yield();
}

void let_next_kernel_start() {
    dawdle();
    --launch->unstarted;
}

void wait_for_previous_kernels() {
    while (launch->previous && launch->previous->running) std::this_thread::yield();
    dawdle();
}

void store_words(u64* place, u64 first, u64 second) {
    for (const u64 word : {first, second}) {
        std::atomic_ref<u64>(*place++).store(word, std::memory_order_relaxed);
        dawdle();
    }
}

void load_words(const u64* place, u64& first, u64& second) {
    u64* words = const_cast<u64*>(place);
    first = std::atomic_ref<u64>(words[0]).load(std::memory_order_relaxed);
    dawdle();
    second = std::atomic_ref<u64>(words[1]).load(std::memory_order_relaxed);
    std::this_thread::yield();
}

float bits_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

u32 float_bits(float value) {
    u32 bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

u32 round_half(float value) {
    const u32 bits = float_bits(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

u32 pack_pair(float low, float high) { return round_half(low) | round_half(high) << 16; }

void unpack_pair(u32 pair, float& low, float& high) {
    low = bits_float(pair << 16);
    high = bits_float(pair & 0xffff0000u);
}

Block& own_block() { return *launch->blocks[blockIdx.x]; }

float inverse_root(float sum, float count, float eps) {
    if (threadIdx.x == 0) own_block().sum = sum;
    return 1.0f / std::sqrt(sum / count + eps);
}

// What is exchanged has two places in turn: a thread that waits in the next exchange has read this exchange.
float __shfl_xor_sync(u32, float value, int far) {
    Warp& warp = own_block().warps[threadIdx.x / kWarp];
    float* values = warp.values[num_exchanges++ % 2];
    const int lane = threadIdx.x % kWarp;
    values[lane] = value;
    warp.barrier.arrive_and_wait();
    return values[lane ^ far];
}

void __syncthreads() { own_block().barrier.arrive_and_wait(); }

float* shared_sums() { return own_block().sums; }

}  // namespace

#include "sum_norm.cu"

namespace {

// All launches of one rank, as a stream runs them. Launch n's sums of squares are `max_rows`
// behind those of the launch before.
void run_stream(std::vector<Arguments> launches, const int* rows, int threads, float* sums,
                u32 seed) {
    std::vector<std::unique_ptr<Launch>> begun;
    std::vector<std::thread> running;
    for (size_t n = 0; n < launches.size(); ++n) {
        Launch* previous = begun.empty() ? nullptr : begun.back().get();
        while (previous && previous->unstarted) std::this_thread::yield();
        begun.push_back(std::make_unique<Launch>(previous, rows[n], threads));
        for (int work = 0; work < rows[n] * threads; ++work) {
            running.emplace_back([=, own = begun.back().get()] {
                threadIdx = {work % threads};
                blockIdx = {work / threads};
                blockDim = {threads};
                launch = own;
                chance.seed(seed + 1000 * n + work);
                sum_norm(launches[n]);
                --own->running;
            });
        }
    }
    for (std::thread& thread : running) thread.join();
    for (size_t n = 0; n < launches.size(); ++n) {
        for (int row = 0; row < rows[n]; ++row) {
            sums[n * launches[n].max_rows + row] = begun[n]->blocks[row]->sum;
        }
    }
}

}  // namespace

// x, residual, output and sums of rank r's launch n lie behind those of its launch n - 1 and of
// rank r - 1, each with `max_rows` rows; x is in `parts`, or whole with 0. `first_count` is how
// many launches each row had before.
extern "C" void run_ranks(int num_launches, const int* rows, int max_rows, int width, int parts,
                          int threads, u32 first_count, const char* x, char* residual,
                          const void* weight, char* output, float* sums, float eps) {
    const int row_words = width * ELEMENT_BYTES / 4;
    const size_t place = size_t(max_rows) * row_words;
    const size_t step = size_t(max_rows) * width * ELEMENT_BYTES;
    const size_t x_step = parts ? size_t(parts) * max_rows * width * 4 : step;
    std::vector<std::vector<u64>> regions(RANKS, std::vector<u64>(2 * RANKS * place));
    std::vector<std::vector<u32>> counts(RANKS, std::vector<u32>(max_rows, first_count));
    std::vector<std::thread> streams;
    for (int rank = 0; rank < RANKS; ++rank) {
        std::vector<Arguments> launches;
        for (int n = 0; n < num_launches; ++n) {
            const size_t number = size_t(rank) * num_launches + n;
            Arguments args{};
            for (int r = 0; r < RANKS; ++r) {
                args.regions[r] = reinterpret_cast<u64>(regions[r].data());
            }
            args.x = x + number * x_step;
            args.residual = residual + number * step;
            args.weight = weight;
            args.output = output + number * step;
            args.launches = counts[rank].data();
            args.part_stride = static_cast<long long>(max_rows) * width;
            args.x_stride = args.residual_stride = width;
            args.parts = parts;
            args.width = width;
            args.rank = rank;
            args.max_rows = max_rows;
            args.row_words = row_words;
            args.eps = eps;
            launches.push_back(args);
        }
        float* own_sums = sums + size_t(rank) * num_launches * max_rows;
        streams.emplace_back(run_stream, launches, rows, threads, own_sums, 77 * rank);
    }
    for (std::thread& stream : streams) stream.join();
}
