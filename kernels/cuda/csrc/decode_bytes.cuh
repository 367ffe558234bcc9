// Pairs of numbers in a decode's attention: their rotation, and conversion from and to bytes.
#pragma once

#include "decode_splits.cuh"

namespace {

template <bool IS_BF16>
__device__ __forceinline__ float2 unpack(u32 pair) {
    if constexpr (IS_BF16) {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000));
    } else {
        float2 both;
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
            "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
            : "=f"(both.x), "=f"(both.y)
            : "r"(pair));
        return both;
    }
}

// Two pairs of numbers that are half a head apart, rotated, in the order of operations of the
// kernel that rotates prompts: a token's key is the same whichever kernel made it.
template <bool IS_BF16>
__device__ __forceinline__ void rotate(u32& near, u32& far, float2 cosine, float2 sine) {
    const float2 left = unpack<IS_BF16>(near), right = unpack<IS_BF16>(far);
    near = pack<IS_BF16>(__fmaf_rn(left.x, cosine.x, -__fmul_rn(right.x, sine.x)),
                         __fmaf_rn(left.y, cosine.y, -__fmul_rn(right.y, sine.y)));
    far = pack<IS_BF16>(__fmaf_rn(right.x, cosine.x, __fmul_rn(left.x, sine.x)),
                        __fmaf_rn(right.y, cosine.y, __fmul_rn(left.y, sine.y)));
}

// Four bytes of a cache as float16, the first two and the last two; exact.
template <int STORED>
__device__ __forceinline__ void widen(u32 bytes, u32& first, u32& last) {
    if constexpr (STORED == FP8) {
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
            "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
            : "=r"(first), "=r"(last)
            : "r"(bytes));
    } else {
        // 1024 + 128 + number in float16, minus 1152.
        const u32 above = bytes ^ 0x80808080;
        const u32 bias = 0x64806480;
        asm("sub.f16x2 %0, %1, %2;"
            : "=r"(first)
            : "r"(__byte_perm(above, 0x64646464, 0x4140)), "r"(bias));
        asm("sub.f16x2 %0, %1, %2;"
            : "=r"(last)
            : "r"(__byte_perm(above, 0x64646464, 0x4342)), "r"(bias));
    }
}

// The first and the third of four bytes, then the second and the fourth.
__device__ __forceinline__ u32 regrouped(u32 bytes) { return __byte_perm(bytes, 0, 0x3120); }

// Two numbers times the inverse scale of their head as bytes, as `kv_quantization` rounds.
template <bool IS_BF16, int STORED>
__device__ __forceinline__ unsigned short narrow(u32 pair, float inverse) {
    constexpr float MOST = STORED == FP8 ? 448 : 127;
    const float2 both = unpack<IS_BF16>(pair);
    const float first = fminf(fmaxf(__fmul_rn(both.x, inverse), -MOST), MOST);
    const float second = fminf(fmaxf(__fmul_rn(both.y, inverse), -MOST), MOST);
    unsigned short bytes;
    if constexpr (STORED == FP8) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
    } else {
        bytes = (__float2int_rn(first) & 0xFF) | (__float2int_rn(second) & 0xFF) << 8;
    }
    return bytes;
}

}  // namespace
