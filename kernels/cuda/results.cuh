// What becomes of sums before they are stored: SwiGLU, rotation, and words that change lanes.
#pragma once

#include "hopper.cuh"

// silu(gate) * up, by the approximate exponential and reciprocal: each is off by two units of
// float32 at most, and a division that is rounded takes ten times as long.
__device__ __forceinline__ float gated(float gate, float up) {
    constexpr float kLog2E = 1.44269504f;
    return gate * reciprocal_fast(1.0f + exp2_fast(-kLog2E * gate)) * up;
}

// Two numbers of 2 bytes of one register.
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

// Two pairs of numbers that are half a head apart, rotated. In the order of operations of the
// kernel that rotates nothing else, so that a token's key does not depend on which made it.
template <bool IS_BF16>
__device__ __forceinline__ void rotate(u32& near, u32& far, float2 cosine, float2 sine) {
    const float2 left = unpack<IS_BF16>(near), right = unpack<IS_BF16>(far);
    near = pack<IS_BF16>(__fmaf_rn(left.x, cosine.x, -__fmul_rn(right.x, sine.x)),
                         __fmaf_rn(left.y, cosine.y, -__fmul_rn(right.y, sine.y)));
    far = pack<IS_BF16>(__fmaf_rn(right.x, cosine.x, __fmul_rn(left.x, sine.x)),
                        __fmaf_rn(right.y, cosine.y, __fmul_rn(left.y, sine.y)));
}

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

// The transpose of a warp's 8 x 8 values of 2 bytes; lane l holds two neighbours of row l / 4.
__device__ __forceinline__ u32 transpose_matrix(u32 values) {
    u32 transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                 : "=r"(transposed)
                 : "r"(values));
    return transposed;
}
