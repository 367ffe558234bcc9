// Names of the operands of products whose width is a number of the build. A chunk is 16 columns of
// a product of 64 rows by a warpgroup.
#pragma once

#include "hopper.cuh"

// The accumulators' names in the instruction, eight a chunk; half a chunk is 0.
#define LIST_0 "%0, %1, %2, %3"
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

// Sums of INT8 are integers.
#ifdef GEMM_INT8
using Sum = int;
#define SUM(value) "+r"(value)
#else
using Sum = float;
#define SUM(value) "+f"(value)
#endif

#define CHUNK(c)                                                                             \
    SUM(d[8 * c]), SUM(d[8 * c + 1]), SUM(d[8 * c + 2]), SUM(d[8 * c + 3]),                  \
        SUM(d[8 * c + 4]), SUM(d[8 * c + 5]), SUM(d[8 * c + 6]), SUM(d[8 * c + 7])
#define SUMS_0 SUM(d[0]), SUM(d[1]), SUM(d[2]), SUM(d[3])
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

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
