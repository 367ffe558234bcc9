// Hopper features beyond plain CUDA C++: transaction barriers, tensor-map copies, warpgroup
// products. No header is included, so that NVRTC compiles this without any include folder.
#pragma once

using u32 = unsigned int;
using u64 = unsigned long long;

// The driver's description of a tensor, made on the host by cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- Barriers in shared memory. A phase ends when all arrivals and all bytes have come.

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// Waits until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 is_over = 0;
    while (!is_over) {
        asm volatile(
            "{\n.reg .pred over;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
            "selp.u32 %0, 1, 0, over;\n}\n"
            : "=r"(is_over)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

// Named barriers of some warps of the block; `threads` counts the threads that wait and those
// that only arrive.
__device__ __forceinline__ void named_wait(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_pass(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Orders this thread's own shared memory accesses before those of copies and products.
__device__ __forceinline__ void fence_shared_for_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Copies of a box of a tensor to shared memory, which count as bytes of a barrier.

// L2 eviction policies of copies, as `createpolicy` encodes them: evict first, normal, last.
constexpr u64 kReadOnce = 0x12F0000000000000ull;
constexpr u64 kReadAgain = 0x1000000000000000ull;
constexpr u64 kReadByAll = 0x14F0000000000000ull;

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void copy_box_3d(u32 to, const TensorMap* map, u32 barrier, int x,
                                            int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void copy_box_5d(u32 to, const TensorMap* map, u32 barrier, int x,
                                            int y, int z, int u, int v, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "l"(policy)
        : "memory");
}

// ---- Registers of a warpgroup: one role releases registers that another role takes.

template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- Products of a warpgroup: 64 rows, 16 of the summed dim, both operands of 2 bytes.

// An operand in shared memory in rows of 128 swizzled bytes; groups of 8 rows are
// `row_group_bytes` apart. `next_panel_bytes`: from one panel of 64 columns to the next, for
// transposed operands.
__device__ __forceinline__ u64 operand(u32 address, u32 next_panel_bytes,
                                       u32 row_group_bytes = 1024) {
    constexpr u64 swizzled_128 = 1ull << 62;
    const u64 row_group = static_cast<u64>(row_group_bytes >> 4) << 32;
    return swizzled_128 | row_group | (static_cast<u64>(next_panel_bytes >> 4) << 16) |
           ((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ void products_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keeps the compiler from moving uses of an accumulator across a fence or a wait.
template <int COUNT>
__device__ __forceinline__ void pin(float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int COUNT>
__device__ __forceinline__ void pin(int (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

#define F8(d, i)                                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]),           \
        "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define F32(d, i) F8(d, i), F8(d, i + 8), F8(d, i + 16), F8(d, i + 24)
#define ALL(...) __VA_ARGS__
#define NAMES_32                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "   \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define NAMES_64                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "   \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "    \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "    \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// sum = or += a @ b.T, with a [64, 16] and b [128, 16] in shared memory.
#define SHARED_PRODUCT(TYPE)                                                              \
    asm volatile(                                                                         \
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"                                \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " NAMES_64         \
        ", %64, %65, adds, 1, 1, 0, 0;\n}\n"                                              \
        : F32(sum, 0), F32(sum, 32)                                                       \
        : "l"(a), "l"(b), "r"(adds))

template <bool IS_BF16>
__device__ __forceinline__ void product_nt(float (&sum)[64], u64 a, u64 b, int adds) {
    if constexpr (IS_BF16) {
        SHARED_PRODUCT("bf16");
    } else {
        SHARED_PRODUCT("f16");
    }
}

// sum += a @ b, with a [64, 16] in registers and b [16, 128 or 64] in shared memory.
#define REGISTER_PRODUCT(SHAPE, TYPE, NAMES, A, B, ACCUMULATORS)                          \
    asm volatile(                                                                         \
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, 1, 0;\n"                                  \
        "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " " NAMES ", " A      \
        ", " B ", adds, 1, 1, 1;\n}\n"                                                    \
        : ACCUMULATORS                                                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define REGISTER_PRODUCT_128(TYPE)                                                        \
    REGISTER_PRODUCT("m64n128k16", TYPE, NAMES_64, "{%64, %65, %66, %67}", "%68",         \
                     ALL(F32(sum, 0), F32(sum, 32)))
#define REGISTER_PRODUCT_64(TYPE)                                                         \
    REGISTER_PRODUCT("m64n64k16", TYPE, NAMES_32, "{%32, %33, %34, %35}", "%36",          \
                     ALL(F32(sum, 0)))

template <bool IS_BF16>
__device__ __forceinline__ void product_nn(float (&sum)[64], const u32* a, u64 b) {
    if constexpr (IS_BF16) {
        REGISTER_PRODUCT_128("bf16");
    } else {
        REGISTER_PRODUCT_128("f16");
    }
}

template <bool IS_BF16>
__device__ __forceinline__ void product_nn(float (&sum)[32], const u32* a, u64 b) {
    if constexpr (IS_BF16) {
        REGISTER_PRODUCT_64("bf16");
    } else {
        REGISTER_PRODUCT_64("f16");
    }
}

// ---- Numbers.

// Two numbers of 2 bytes in one register, the first in the lower half.
template <bool IS_BF16>
__device__ __forceinline__ u32 pack(float first, float second) {
    u32 packed;
    if constexpr (IS_BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    }
    return packed;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Four 8x8 matrices from a warp's registers; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
