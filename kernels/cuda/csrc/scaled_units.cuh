// Units of integer_units.cuh whose fragments are weights as numbers of x's type, for products of so
// many rows that sums with scales of their own would cost more.
#pragma once

#include "integer_units.cuh"

namespace {

// Whether the type of x holds every scale, and whether a weight is one step from its integer: half
// of the range times a scale is exact, other zeros are not.
constexpr bool kHoldsScales = INT_SCALES == (kIsBf16 ? 0 : 1);
constexpr bool kIsOneStep = kIsBf16 && kHoldsScales && !INT_ZEROS;

// Weights of a `ScaledUnit` are divided by this number, so that powers of two for their integers
// are in the range of bfloat16.
constexpr float kDivisor = kIsOneStep ? 65536.0f : 1.0f;

// A unit whose fragments hold weights, (integer - zero) * scale, rounded to the type of x. A scale
// of more bits than that type has is the sum of two numbers of the type.
struct ScaledUnit {
    u32 words[kWords];
    u32 zeros[INT_GROUPS];
    // What integers, or kStep times them, are multiplied by; and the rest of the scale, or what is
    // added. In both halves.
    u32 scales[INT_GROUPS][2], rests[INT_GROUPS][2];

    __device__ __forceinline__ void load(u32 unit) {
        const int thread = threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < kWords / 4; ++i) {
            load_words(unit + i * 2048 + thread * 16, words + 4 * i);
        }
        const int pair = thread / 4;
        u32 at = unit + kValuesBytes;
#pragma unroll
        for (int g = 0; g < INT_GROUPS; ++g, at += kScaleBytes) load_scales(at, pair, g);
#pragma unroll
        for (int g = 0; g < INT_GROUPS; ++g, at += kZeroBytes) {
            zeros[g] = INT_ZEROS ? load_word(at + 4 * pair) : 0;
        }
    }

    __device__ __forceinline__ void load_scales(u32 at, int pair, int g) {
        if constexpr (kHoldsScales) {
            const u32 both = load_word(at + 4 * pair);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 scale = permute(both, both, i ? 0x3232 : 0x1010);
                scales[g][i] = multiply_add_pair(scale, i ? kOddPower : kPower, kMinusZeros);
                if (kIsOneStep) rests[g][i] = multiply_add_pair(scale, kZeroPower, kMinusZeros);
            }
            return;
        }
        float scale[2];
        Unit::load_scales(at, pair, scale);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            scale[i] *= kOverStep;
            scales[g][i] = pack<kIsBf16>(scale[i], scale[i]);
            const float rest = scale[i] - first_of_pair(scales[g][i]);
            rests[g][i] = pack<kIsBf16>(rest, rest);
        }
    }

    // Powers of two of scales: of a step 2^133 or 2^129 over the divisor, otherwise 1 / kStep; and
    // minus half of the range over the divisor.
    static constexpr u32 kPower = kIsOneStep ? 0x7A007A00u : kIsBf16 ? 0x42804280u : 0x60006000u;
    static constexpr u32 kOddPower = kIsOneStep && INT_BITS == 4 ? 0x78007800u : kPower;
    static constexpr u32 kZeroPower = INT_BITS == 4 ? 0xB900B900u : 0xBB00BB00u;

    // The fragment of the step-th 16 inputs.
    __device__ __forceinline__ void fragment(int step, u32* a) const {
        const int g = step * INT_GROUPS / kSteps;
        const u32* own = words + step * (INT_BITS / 4);
        if constexpr (!kIsOneStep) dequantize(own, ZeroPair(zeros[g]), a);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const u32 scale = scales[g][s % 2], rest = rests[g][s % 2];
            if constexpr (kIsOneStep) {
                a[s] = multiply_add_pair(integers(own, s), scale, rest);
            } else if constexpr (kHoldsScales) {
                a[s] = multiply_add_pair(a[s], scale, kMinusZeros);
            } else {
                a[s] = multiply_add_pair(a[s], scale, multiply_add_pair(a[s], rest, kMinusZeros));
            }
        }
    }
};

}  // namespace
