// Thread block clusters: copies into several blocks, barriers and loads across them; and
// kernels that overlap with the preceding one.
#pragma once

#include "hopper.cuh"

// ---- Copies of a box of a matrix; `policy` says how long the cache should keep it.

__device__ __forceinline__ void copy_box_2d(u32 to, const TensorMap* map, u32 barrier, int x,
                                            int y, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(policy)
        : "memory");
}

// Into every block of the cluster in `mask`, at the same shared addresses.
__device__ __forceinline__ void copy_box_to(u32 to, const TensorMap* map, u32 barrier, int x,
                                            int y, unsigned short mask, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(mask), "l"(policy)
        : "memory");
}

// ---- Clusters.

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Barrier of all threads of all blocks of the cluster. Does not order ordinary stores: data for
// another block goes through `send_bytes`.
__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.relaxed.aligned;\n"
        "barrier.cluster.wait.aligned;" ::
            : "memory");
}

// Arrives at the barrier with this address in block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// The address in block `rank` of the cluster that corresponds to an address of this block.
__device__ __forceinline__ u32 address_at(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Copies shared memory of this block to another; the bytes count for the barrier there.
__device__ __forceinline__ void send_bytes(u32 there, u32 from, u32 bytes, u32 barrier_there) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        " [%0], [%1], %2, [%3];" ::"r"(there),
        "r"(from), "r"(bytes), "r"(barrier_there)
        : "memory");
}

// ---- Programmatic dependent launch.

// After this, results of preceding kernels may be read, and their inputs overwritten.
__device__ __forceinline__ void wait_for_previous_kernels() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
