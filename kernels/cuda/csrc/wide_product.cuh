// The product of a warpgroup with 16 x GEMM_CHUNKS columns, a number of the build; or with
// 16 x GEMM_PRODUCT_CHUNKS of them at a time.
#pragma once

#include "accumulators.cuh"

#ifndef GEMM_PRODUCT_CHUNKS
#define GEMM_PRODUCT_CHUNKS GEMM_CHUNKS
#endif

constexpr int kProductSums = GEMM_PRODUCT_CHUNKS ? 8 * GEMM_PRODUCT_CHUNKS : 4;

// Columns of the instruction; numbers of the operands behind the sums. 0 is half a chunk.
#define SHAPE_0 "8", "%4", "%5"
#define SHAPE_1 "16", "%8", "%9"
#define SHAPE_2 "32", "%16", "%17"
#define SHAPE_3 "48", "%24", "%25"
#define SHAPE_4 "64", "%32", "%33"
#define SHAPE_5 "80", "%40", "%41"
#define SHAPE_6 "96", "%48", "%49"
#define SHAPE_7 "112", "%56", "%57"
#define SHAPE_8 "128", "%64", "%65"
#define SHAPE_9 "144", "%72", "%73"
#define SHAPE_10 "160", "%80", "%81"
#define SHAPE_11 "176", "%88", "%89"
#define SHAPE_12 "192", "%96", "%97"
#define SHAPE_13 "208", "%104", "%105"
#define SHAPE_14 "224", "%112", "%113"
#define SHAPE_15 "240", "%120", "%121"
#define SHAPE_16 "256", "%128", "%129"

#define CODE_(columns, a, b, list, type, adds)                                               \
    "{\n.reg .pred add;\nsetp.eq.u32 add, 1, " adds ";\n"                                    \
    "wgmma.mma_async.sync.aligned.m64n" columns type " {" list "}, " a ", " b                \
    ", add" MODIFIERS ";\n}"
#define CODE(...) CODE_(__VA_ARGS__)

// 32 bytes of the inner dimension: 16 numbers of 2 bytes, or 32 of one byte. Modifiers are the
// signs of floats, and the orders of numbers of 2 bytes.
#if defined(GEMM_INT8)
#define OPERAND_TYPE "k32.s32.s8.s8"
#define MODIFIERS ""
#elif defined(GEMM_FP8)
#define OPERAND_TYPE "k32.f32.e4m3.e4m3"
#define MODIFIERS ", 1, 1"
#elif defined(GEMM_FLOAT16)
#define OPERAND_TYPE "k16.f32.f16.f16"
#define MODIFIERS ", 1, 1, 0, 0"
#else
#define OPERAND_TYPE "k16.f32.bf16.bf16"
#define MODIFIERS ", 1, 1, 0, 0"
#endif
#define WIDE_PRODUCT(adds)                                                                   \
    asm volatile(CODE(JOIN(SHAPE_, GEMM_PRODUCT_CHUNKS), JOIN(LIST_, GEMM_PRODUCT_CHUNKS),   \
                      OPERAND_TYPE, adds)                                                    \
                 : JOIN(SUMS_, GEMM_PRODUCT_CHUNKS)                                                  \
                 : "l"(x), "l"(w))

// d += (64 rows of x) @ (16 x GEMM_PRODUCT_CHUNKS rows of w).T over 32 bytes of the inner dimension.
__device__ __forceinline__ void add_wide_product(Sum (&d)[kProductSums], u64 x, u64 w) {
    WIDE_PRODUCT("1");
}

// The same product alone in d.
__device__ __forceinline__ void put_wide_product(Sum (&d)[kProductSums], u64 x, u64 w) {
    WIDE_PRODUCT("0");
}
