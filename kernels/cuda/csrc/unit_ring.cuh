// The ring of stages that hold rows of x, then units of neighbouring tiles.
//
// Defined before: kStageBytes, and kTokenBytes, the bytes of the rows in a stage. kUnitBytes is that
// of integer_units.cuh.
#pragma once

#include "integer_units.cuh"

namespace {

struct UnitRing {
    u32 tiles, full, empty;
    int stages;
    int stage = 0;
    u32 parity = 0;

    __device__ u32 x() const { return tiles + stage * kStageBytes; }
    __device__ u32 unit(int tile) const { return x() + kTokenBytes + tile * kUnitBytes; }
    __device__ u32 filled() const { return full + 8 * stage; }
    __device__ u32 released() const { return empty + 8 * stage; }
    __device__ void advance() {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

}  // namespace
