// Shared by gemm.cu and grouped_gemm.cu: the types of a launch, the width of a tile, and the
// ring of tiles.
#pragma once

#include "cluster.cuh"

namespace {

constexpr int kInner = 64;  // numbers of 2 bytes, or pairs of FP8
constexpr int kRowBytes = 2 * kInner;
#ifdef GEMM_FLOAT16
constexpr bool kIsBf16 = false;
#else
constexpr bool kIsBf16 = true;
#endif
#ifdef GEMM_GATED
constexpr bool kIsGated = true;
#else
constexpr bool kIsGated = false;
#endif

// GEMM_STAGES stages of shared memory, each with a tile of x and one of w at these offsets,
// their barriers, and this thread's position in the ring.
template <int STAGE_BYTES, int X_OFFSET, int W_OFFSET>
struct TileRing {
    u32 tiles, full, empty;
    int stage = 0;
    u32 parity = 0;

    __device__ u32 x() const { return tiles + stage * STAGE_BYTES + X_OFFSET; }
    __device__ u32 w() const { return tiles + stage * STAGE_BYTES + W_OFFSET; }
    __device__ u32 filled() const { return full + 8 * stage; }
    __device__ u32 released() const { return empty + 8 * stage; }
    __device__ void advance() {
        if (++stage == GEMM_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

}  // namespace
