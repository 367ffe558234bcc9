// The product of a warpgroup with 16 x GEMM_CHUNKS columns, a number of the build.
#pragma once

#include "hopper.cuh"

// The accumulators' names in the instruction, eight a chunk.
#define LIST_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LIST_2 LIST_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST_3 LIST_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LIST_4 LIST_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_5 LIST_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LIST_6 LIST_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define LIST_7 LIST_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define LIST_8 LIST_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_9 LIST_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LIST_10 LIST_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define LIST_11 LIST_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define LIST_12 LIST_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define LIST_13 LIST_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define LIST_14 LIST_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define LIST_15 LIST_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define LIST_16 LIST_15 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define CHUNK(c)                                                                             \
    "+f"(d[8 * c]), "+f"(d[8 * c + 1]), "+f"(d[8 * c + 2]), "+f"(d[8 * c + 3]),              \
        "+f"(d[8 * c + 4]), "+f"(d[8 * c + 5]), "+f"(d[8 * c + 6]), "+f"(d[8 * c + 7])
#define SUMS_1 CHUNK(0)
#define SUMS_2 SUMS_1, CHUNK(1)
#define SUMS_3 SUMS_2, CHUNK(2)
#define SUMS_4 SUMS_3, CHUNK(3)
#define SUMS_5 SUMS_4, CHUNK(4)
#define SUMS_6 SUMS_5, CHUNK(5)
#define SUMS_7 SUMS_6, CHUNK(6)
#define SUMS_8 SUMS_7, CHUNK(7)
#define SUMS_9 SUMS_8, CHUNK(8)
#define SUMS_10 SUMS_9, CHUNK(9)
#define SUMS_11 SUMS_10, CHUNK(10)
#define SUMS_12 SUMS_11, CHUNK(11)
#define SUMS_13 SUMS_12, CHUNK(12)
#define SUMS_14 SUMS_13, CHUNK(13)
#define SUMS_15 SUMS_14, CHUNK(14)
#define SUMS_16 SUMS_15, CHUNK(15)

// Columns of the instruction; numbers of the operands behind the sums.
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

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define CODE_(columns, a, b, list, type, adds)                                               \
    "{\n.reg .pred add;\nsetp.eq.u32 add, 1, " adds ";\n"                                    \
    "wgmma.mma_async.sync.aligned.m64n" columns type " {" list "}, " a ", " b                \
    ", add, 1, 1" TRANSPOSITIONS ";\n}"
#define CODE(...) CODE_(__VA_ARGS__)

// 32 bytes of the inner dimension: 16 numbers of 2 bytes, or 32 of FP8.
#ifdef GEMM_FP8
#define OPERAND_TYPE "k32.f32.e4m3.e4m3"
#define TRANSPOSITIONS ""
#elif defined(GEMM_FLOAT16)
#define OPERAND_TYPE "k16.f32.f16.f16"
#define TRANSPOSITIONS ", 0, 0"
#else
#define OPERAND_TYPE "k16.f32.bf16.bf16"
#define TRANSPOSITIONS ", 0, 0"
#endif
#define WIDE_PRODUCT(adds)                                                                   \
    asm volatile(CODE(JOIN(SHAPE_, GEMM_CHUNKS), JOIN(LIST_, GEMM_CHUNKS), OPERAND_TYPE,     \
                      adds)                                                                  \
                 : JOIN(SUMS_, GEMM_CHUNKS)                                                  \
                 : "l"(x), "l"(w))

// d += (64 rows of x) @ (16 x GEMM_CHUNKS rows of w).T over 32 bytes of the inner dimension.
__device__ __forceinline__ void add_wide_product(float (&d)[8 * GEMM_CHUNKS], u64 x, u64 w) {
    WIDE_PRODUCT("1");
}

// The same product alone in d.
__device__ __forceinline__ void put_wide_product(float (&d)[8 * GEMM_CHUNKS], u64 x, u64 w) {
    WIDE_PRODUCT("0");
}
