// The product of a warpgroup with INT_ROWS columns, a number of the build. The first operand lies
// in registers.
#pragma once

#include "accumulators.cuh"

// Columns of the instruction; numbers of the operands behind the sums.
#define FRAGMENT_0 "8", "{%4, %5, %6, %7}", "%8", "%9"
#define FRAGMENT_1 "16", "{%8, %9, %10, %11}", "%12", "%13"
#define FRAGMENT_2 "32", "{%16, %17, %18, %19}", "%20", "%21"
#define FRAGMENT_3 "48", "{%24, %25, %26, %27}", "%28", "%29"
#define FRAGMENT_4 "64", "{%32, %33, %34, %35}", "%36", "%37"
#define FRAGMENT_5 "80", "{%40, %41, %42, %43}", "%44", "%45"
#define FRAGMENT_6 "96", "{%48, %49, %50, %51}", "%52", "%53"
#define FRAGMENT_7 "112", "{%56, %57, %58, %59}", "%60", "%61"
#define FRAGMENT_8 "128", "{%64, %65, %66, %67}", "%68", "%69"
#define FRAGMENT_9 "144", "{%72, %73, %74, %75}", "%76", "%77"
#define FRAGMENT_10 "160", "{%80, %81, %82, %83}", "%84", "%85"
#define FRAGMENT_11 "176", "{%88, %89, %90, %91}", "%92", "%93"
#define FRAGMENT_12 "192", "{%96, %97, %98, %99}", "%100", "%101"
#define FRAGMENT_13 "208", "{%104, %105, %106, %107}", "%108", "%109"
#define FRAGMENT_14 "224", "{%112, %113, %114, %115}", "%116", "%117"
#define FRAGMENT_15 "240", "{%120, %121, %122, %123}", "%124", "%125"
#define FRAGMENT_16 "256", "{%128, %129, %130, %131}", "%132", "%133"

#ifdef GEMM_FLOAT16
#define NUMBERS "f16"
#else
#define NUMBERS "bf16"
#endif

#define FRAGMENT_CODE_(columns, a, b, adds, list, type)                                      \
    "{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds ", 0;\n"                                  \
    "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" list "}, " a   \
    ", " b ", adds, 1, 1, 0;\n}"
#define FRAGMENT_CODE(...) FRAGMENT_CODE_(__VA_ARGS__)

// d = or += a @ x.T: a [64, 16] in the registers of a warpgroup, x [INT_ROWS, 16] in shared
// memory.
__device__ __forceinline__ void add_fragment_product(float (&d)[INT_ROWS / 2], const u32* a,
                                                     u64 x, int adds) {
    asm volatile(FRAGMENT_CODE(JOIN(FRAGMENT_, INT_CHUNKS), JOIN(LIST_, INT_CHUNKS), NUMBERS)
                 : JOIN(SUMS_, INT_CHUNKS)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(adds));
}
