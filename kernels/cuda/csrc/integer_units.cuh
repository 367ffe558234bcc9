// Units of integer_gemm.cu: 64 outputs x 128 inputs of a weight, packed for the threads of a
// warpgroup. kernels/cuda/integer_units.py packs the units.
//
// Word j of a thread holds its fragment of inputs 16 j to 16 j + 15: four registers of two
// numbers, for output lane / 4 of the warp's 16, and the output eight further. With 4 bits,
// register s has nibble s of the word in its lower half and nibble s + 4 in its upper half.
// With 8 bits the fragment is two words of two registers, which have their even and odd bytes.
// Behind the integers lie the scales of each group of inputs, then the zeros: pairs of the outputs
// of a thread.
//
// INT_BITS: 4 or 8. INT_GROUPS: groups of inputs in a unit: 1, 2 or 4. INT_ZEROS: 1 where groups
// have zeros; otherwise half of the range stands for zero. INT_SCALES: 0 for bfloat16 scales, 1
// for float16, 2 for float32, 3 for exponents of one byte (fp4_units.cuh).
#pragma once

#include "tile_ring.cuh"

namespace {

constexpr int kUnitOutputs = 64, kUnitInputs = 128;
constexpr int kWords = INT_BITS == 4 ? 8 : 16;
constexpr int kValuesBytes = kWords * 128 * 4;
constexpr int kScaleBytes = INT_SCALES == 3 ? 64 : INT_SCALES == 2 ? 256 : 128;
constexpr int kZeroBytes = INT_ZEROS ? 128 : 0;
constexpr int kUnitBytes = kValuesBytes + INT_GROUPS * (kScaleBytes + kZeroBytes);
constexpr int kSteps = kUnitInputs / 16;

// The warpgroup of this thread, in a form that the compiler takes as uniform in a warp.
__device__ __forceinline__ int warpgroup() {
    return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
}

// Copies bytes of global memory, 16 or more, which count for a barrier.
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier,
                                           u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void load_words(u32 address, u32* words) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ u32 load_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
    u32 chosen;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(a), "r"(b), "r"(selector));
    return chosen;
}

// a * b + c of both halves.
__device__ __forceinline__ u32 multiply_add_pair(u32 a, u32 b, u32 c) {
    u32 sum;
    if constexpr (kIsBf16) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    } else {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    }
    return sum;
}

constexpr u32 kMinusZeros = 0x80008000u;  // what a sum adds to a product that is to stay as it is

__device__ __forceinline__ float first_of_pair(u32 pair) {
    if (kIsBf16) return __uint_as_float(pair << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(pair)));
    return value;
}

// The bits of an integer below 256 are those of a number, mostly a subnormal one: 2^-133 (bfloat16)
// or 2^-24 (float16) times the integer. A product by a power of two makes the number kStep times
// the integer, whichever nibble held the integer.
constexpr float kOverStep = kIsBf16 ? 64.0f : 512.0f;  // 1 / kStep
constexpr u32 kFromLow = kIsBf16 ? 0x7F007F00u : 0x78007800u;   // 2^127, 2^15
constexpr u32 kFromHigh = kIsBf16 ? 0x7D007D00u : 0x68006800u;  // 2^123, 2^11
constexpr u32 kMinusHalfRange = kIsBf16 ? (INT_BITS == 4 ? 0xBE00BE00u : 0xC000C000u)
                                        : (INT_BITS == 4 ? 0xA400A400u : 0xB400B400u);

// Minus kStep times the zeros of a thread's two outputs.
struct ZeroPair {
    u32 of[2];

    __device__ explicit ZeroPair(u32 pair) {
        if constexpr (INT_ZEROS) {
            constexpr u32 kMinus = kFromLow | 0x80008000u;
            of[0] = multiply_add_pair(permute(pair, pair, 0x1010), kMinus, kMinusZeros);
            of[1] = multiply_add_pair(permute(pair, pair, 0x3232), kMinus, kMinusZeros);
        } else {
            of[0] = of[1] = kMinusHalfRange;
        }
    }
};

// The integers of register s of a fragment, as bits of numbers; those of odd registers are 16 times
// as large with 4 bits.
__device__ __forceinline__ u32 integers(const u32* words, int s) {
    if constexpr (INT_BITS == 4) {
        const u32 word = s < 2 ? words[0] : words[0] >> 8;
        return word & (s % 2 ? 0x00F000F0u : 0x000F000Fu);
    }
    const u32 word = words[s / 2];
    return s % 2 ? permute(word, 0, 0x4341) : word & 0x00FF00FFu;
}

// The fragment of 16 inputs, kStep times integers less their zeros: exact.
__device__ __forceinline__ void dequantize(const u32* words, const ZeroPair& zeros, u32* a) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const u32 power = INT_BITS == 4 && s % 2 ? kFromHigh : kFromLow;
        a[s] = multiply_add_pair(integers(words, s), power, zeros.of[s % 2]);
    }
}

// A thread's words and groups of one unit.
struct Unit {
    u32 words[kWords];
    u32 zeros[INT_GROUPS];
    float scales[INT_GROUPS][2];

    __device__ __forceinline__ void load(u32 unit) {
        const int thread = threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < kWords / 4; ++i) {
            load_words(unit + i * 2048 + thread * 16, words + 4 * i);
        }
        const int pair = thread / 4;
        u32 at = unit + kValuesBytes;
#pragma unroll
        for (int g = 0; g < INT_GROUPS; ++g, at += kScaleBytes) load_scales(at, pair, scales[g]);
#pragma unroll
        for (int g = 0; g < INT_GROUPS; ++g, at += kZeroBytes) {
            zeros[g] = INT_ZEROS ? load_word(at + 4 * pair) : 0;
        }
    }

    static __device__ __forceinline__ void load_scales(u32 at, int pair, float (&scale)[2]) {
        if constexpr (INT_SCALES == 2) {
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(scale[0]), "=f"(scale[1])
                         : "r"(at + 8 * pair)
                         : "memory");
            return;
        }
        const u32 both = load_word(at + 4 * pair);
        if constexpr (INT_SCALES == 0) {
            scale[0] = __uint_as_float(both << 16);
            scale[1] = __uint_as_float(both & 0xFFFF0000u);
        } else {
            asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
                "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
                : "=f"(scale[0]), "=f"(scale[1])
                : "r"(both));
        }
    }

    // The fragment of the step-th 16 inputs, times kStep.
    __device__ __forceinline__ void fragment(int step, u32* a) const {
        dequantize(words + step * (INT_BITS / 4), ZeroPair(zeros[step * INT_GROUPS / kSteps]), a);
    }
};

}  // namespace
