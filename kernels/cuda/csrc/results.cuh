// Sums before they are stored: SwiGLU, and words that change lanes.
#pragma once

#include "hopper.cuh"

// silu(gate) * up, by the approximate exponential and reciprocal: each is off by at most two
// units in the last place of float32, and an exactly rounded division takes ten times as long.
__device__ __forceinline__ float gated(float gate, float up) {
    constexpr float kLog2E = 1.44269504f;
    return gate * reciprocal_fast(1.0f + exp2_fast(-kLog2E * gate)) * up;
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
