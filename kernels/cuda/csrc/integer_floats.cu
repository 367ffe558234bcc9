// A weight of integers as floats, row by row, for products of very many rows: (integer - zero) *
// scale in float32, rounded once. A block makes one unit; macros: integer_units.cuh.
#include "integer_units.cuh"

namespace {

constexpr int kPitch = kUnitInputs + 8;  // of floats in shared memory, spread over the banks

__device__ __forceinline__ float widened(u32 pair, int half) {
    if (kIsBf16) return __uint_as_float(half ? pair & 0xFFFF0000u : pair << 16);
    float value;
    const unsigned short bits = static_cast<unsigned short>(half ? pair >> 16 : pair);
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

}  // namespace

struct Arguments {
    const uint4* units;  // [tiles of 64 outputs, inner steps, kUnitBytes]
    uint4* out;          // [tiles x 64, inner steps x 128], two bytes a number
    int inner_steps;
};

extern "C" __global__ void __launch_bounds__(128) integer_floats(const Arguments args) {
    __shared__ uint4 packed[kUnitBytes / 16];
    __shared__ __align__(16) unsigned short floats[kUnitOutputs * kPitch];
    const uint4* source = args.units + static_cast<u64>(blockIdx.x) * (kUnitBytes / 16);
    for (int i = threadIdx.x; i < kUnitBytes / 16; i += 128) packed[i] = source[i];
    __syncthreads();
    Unit unit;
    unit.load(shared_address(packed));
    const int lane = threadIdx.x % 32;
    const int output = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        u32 a[4];
        unit.fragment(step, a);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const float scale = unit.scales[step * INT_GROUPS / kSteps][s % 2];
            const float low = widened(a[s], 0) * kOverStep, high = widened(a[s], 1) * kOverStep;
            const int at = (output + s % 2 * 8) * kPitch + 16 * step + s / 2 * 8 + lane % 4 * 2;
            *reinterpret_cast<u32*>(floats + at) =
                pack<kIsBf16>(low * scale, high * scale);
        }
    }
    __syncthreads();
    const int tile = blockIdx.x / args.inner_steps, column = blockIdx.x % args.inner_steps;
    constexpr int kChunks = kUnitInputs / 8;  // of 16 bytes in a row
    for (int i = threadIdx.x; i < kUnitOutputs * kChunks; i += 128) {
        const int row = i / kChunks, chunk = i % kChunks;
        const u64 line = static_cast<u64>(tile) * kUnitOutputs + row;
        args.out[(line * args.inner_steps + column) * kChunks + chunk] =
            *reinterpret_cast<const uint4*>(floats + row * kPitch + 8 * chunk);
    }
}
