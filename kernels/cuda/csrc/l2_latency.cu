// The latency of the L2 cache from each multiprocessor, by address.

#include "hopper.cuh"

namespace {

constexpr int CHAIN = 8;
constexpr u32 RARE = 0x7FFFFF01;

__device__ __forceinline__ u32 clock_now() {
    u32 now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    return now;
}

}  // namespace

struct Arguments {
    const u64* addresses;
    u32* cycles;  // [processors, count]: of CHAIN dependent atomic additions
    int count, repeats;
};

// One block on each multiprocessor. An atomic operation runs at its address's L2 partition,
// while a read may hit a copy in the near one. Adding zero leaves memory unchanged, even under
// concurrent writes.
extern "C" __global__ void l2_latency(const __grid_constant__ Arguments a) {
    u32 processor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
    if (threadIdx.x) return;
    for (int i = 0; i < a.count; ++i) {
        // Processors access different addresses at a time.
        const int number = (i + 7ll * processor) % a.count;
        u32* word = reinterpret_cast<u32*>(a.addresses[number]);
        u32 found = atomicAdd(word, 0), least = ~0u;
        for (int repeat = 0; repeat < a.repeats; ++repeat) {
            const u32 begin = clock_now();
            // Each address depends on the word before; the next word is practically never
            // accessed.
#pragma unroll
            for (int k = 0; k < CHAIN; ++k) found = atomicAdd(word + (found == RARE), 0);
            const u32 end = clock_now();
            least = min(least, end - begin + (found == RARE));
        }
        a.cycles[static_cast<long long>(processor) * a.count + number] = least;
    }
}
