// Rows of FP8 with a scale for each 128 values: the inputs of the next product, as a kernel makes
// them, and copies of their scales.
#pragma once

#include "hopper.cuh"

// How results are quantized, and where their scales go.
struct Quantization {
    float* scales;       // [groups, pitch]; null if results are stored as they are
    const float* fixed;  // the scale of all results; null if each group makes its own
    float bound;         // largest magnitude that makes a scale; 0: none
    int pitch;
};

namespace {

constexpr int kGroup = 128;

// Whole multiples of 16 bytes, which count as bytes of a barrier.
__device__ __forceinline__ void copy_flat(u32 to, const void* from, int count, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(from), "r"(count), "r"(barrier)
        : "memory");
}

// The scale by which values up to `peak` use the whole range of e4m3.
__device__ __forceinline__ float scale_of(const Quantization& as, float peak) {
    if (as.fixed) return __ldg(as.fixed);
    if (as.bound > 0) peak = fminf(peak, as.bound);
    return __fdiv_rn(fmaxf(peak, 1e-10f), 448.0f);
}

// Two values times the inverse of their scale, the first one in the lower byte.
__device__ __forceinline__ u32 two_bytes(float2 values, float inverse) {
    unsigned short bytes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(bytes)
        : "f"(__fmul_rn(values.y, inverse)), "f"(__fmul_rn(values.x, inverse)));
    return bytes;
}

__device__ __forceinline__ float larger(float peak, float2 values) {
    return fmaxf(peak, fmaxf(fabsf(values.x), fabsf(values.y)));
}

}  // namespace
