// Units of integer_units.cuh of FP4 numbers (E2M1) with a power of two for 32 inputs (MXFP4), for x
// in bfloat16. kernels/cuda/integer_units.py packs the units.
//
// A word holds eight codes of a sign and three bits: two exponent bits and a fraction bit. Register
// s of a fragment has a code in each half, as a bfloat16 number with the sign in bit 15 and the
// three bits in bits 8 to 6: 2^-126 times the number, exactly, subnormal numbers included. In the
// word the bits lie where few shifts bring them there:
//
//     register   sign   three bits   shifts
//     0          15     8 to 6       none
//     1          14     5 to 3       1 and 3 to the left
//     2          9      2 to 0       6 to the left
//     3          13     12 to 10     2 to the left, 4 to the right
//
// A scale is one byte: the exponent of 2^110 times the power of two, so that a product is the
// weight over kFp4Divisor, exactly.
#pragma once

#include "integer_units.cuh"

namespace {

constexpr float kFp4Divisor = 65536.0f;

// A pair of numbers times the lower or upper half of a pair of scales.
template <int HALF>
__device__ __forceinline__ u32 scaled_pair(u32 numbers, u32 scales) {
    u32 product;
#define SCALED_PAIR(own)                                                                     \
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\n"              \
        "mov.b32 both, {" own ", " own "};\nfma.rn.bf16x2 %0, %1, both, %3;\n}"              \
        : "=r"(product)                                                                      \
        : "r"(numbers), "r"(scales), "r"(kMinusZeros))
    if constexpr (HALF == 0) {
        SCALED_PAIR("low");
    } else {
        SCALED_PAIR("high");
    }
#undef SCALED_PAIR
    return product;
}

struct Fp4Unit {
    u32 words[kWords];
    u32 scales[INT_GROUPS / 2][2];  // of two groups, for each of the thread's outputs

    __device__ __forceinline__ void load(u32 unit) {
        const int thread = threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < kWords / 4; ++i) {
            load_words(unit + i * 2048 + thread * 16, words + 4 * i);
        }
        u32 exponents[2];  // of groups 0, 2, 1 and 3, for each of the thread's outputs
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(exponents[0]), "=r"(exponents[1])
                     : "r"(unit + kValuesBytes + thread / 4 * 8)
                     : "memory");
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            scales[0][i] = exponents[i] << 7 & 0x7F807F80u;
            scales[1][i] = exponents[i] >> 1 & 0x7F807F80u;
        }
    }

    // The fragment of the step-th 16 inputs.
    __device__ __forceinline__ void fragment(int step, u32* a) const {
        constexpr u32 kSigns = 0x80008000u, kBits = 0x01C001C0u;
        const int g = step * INT_GROUPS / kSteps;
        const u32 word = words[step];
        a[0] = word & (kSigns | kBits);
        a[1] = word << 3 & kBits | word << 1 & kSigns;
        a[2] = word << 6 & (kSigns | kBits);
        a[3] = word >> 4 & kBits | word << 2 & kSigns;
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const u32 pair = scales[g / 2][s % 2];
            a[s] = g % 2 ? scaled_pair<1>(a[s], pair) : scaled_pair<0>(a[s], pair);
        }
    }
};

}  // namespace
