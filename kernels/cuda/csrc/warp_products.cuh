// Products of a warp, and matrices of 2 bytes in its registers.
#pragma once

#include "hopper.cuh"

namespace {

// Four 8x8 matrices of 2 bytes to a warp's registers; lane l names row l % 8 of matrix l / 8.
template <bool IS_TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
    if constexpr (IS_TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
    }
}

// sum [16, 8] += a [16, 16] @ b [16, 8] by a warp.
template <bool IS_BF16>
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#define WARP_PRODUCT(TYPE)                                                                \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                   \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"   \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (IS_BF16) {
        WARP_PRODUCT("bf16");
    } else {
        WARP_PRODUCT("f16");
    }
#undef WARP_PRODUCT
}

// The transpose of an 8x8 matrix of 2 bytes in a warp's registers.
__device__ __forceinline__ u32 transposed(u32 matrix) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
}

}  // namespace
