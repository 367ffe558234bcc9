// Results of pieces of sequences, and of sides of memory, weighed into those of sequences.
#pragma once

#include "decode_pieces.cuh"

namespace {

// A warp's view of where results are.
template <bool IS_BF16, int HEAD>
struct Results {
    const Arguments& a;
    int kv_head, side, lane;

    __device__ __forceinline__ int sides() const { return side < 0 ? 1 : 2; }

    __device__ __forceinline__ int heads() const { return a.kv_heads * a.group; }

    // Of head 0 of a piece, among the pairs of results and heads.
    __device__ __forceinline__ long long place_of(int piece) const {
        return (static_cast<long long>(piece) * sides() + max(side, 0)) * heads();
    }

    __device__ __forceinline__ void store(int sequence, int place, float4 value) const {
        char* to = static_cast<char*>(a.output) + 2 * (sequence * a.output_stride + place);
        *reinterpret_cast<uint2*>(to) =
            make_uint2(pack<IS_BF16>(value.x, value.y), pack<IS_BF16>(value.z, value.w));
    }

    // Of all pieces of a sequence, one head's.
    __device__ __forceinline__ void weigh(int first, int count, int sequence, int head) {
        const int stride = heads(), results = count * sides();
        const long long begin = static_cast<long long>(first) * sides() * stride + head;
        const float* log_sums = a.log_sums + begin;
        float most = minus_infinity();
        for (int i = lane; i < results; i += 32)
            most = fmaxf(most, __ldcg(log_sums + static_cast<long long>(i) * stride));
        for (int i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
        // With heads of 64, a lane's four columns are another's too.
        const int column = lane * 4 % HEAD;
        const float* partial = a.partial + begin * HEAD + column;
        float4 value = make_float4(0, 0, 0, 0);
        float all = 0;
        for (int base = 0; base < results; base += 32) {
            const int number = min(32, results - base);
            float own = 0;
            if (lane < number)
                own = weight_of(
                    __ldcg(log_sums + static_cast<long long>(base + lane) * stride), most);
#pragma unroll 16
            for (int i = 0; i < number; ++i) {
                const float weight = __shfl_sync(~0u, own, i);
                const float4 part = __ldcg(reinterpret_cast<const float4*>(
                    partial + static_cast<long long>(base + i) * stride * HEAD));
                add(value, weight, part);
                all += weight;
            }
        }
        store_mean(sequence, head, column, value, all);
    }

    // Of the two sides of a sequence in one piece, all heads of the group: as `weigh`, but all
    // that is asked for comes at once.
    __device__ __forceinline__ void weigh_two(int piece, int sequence) {
        const int stride = heads(), first_head = kv_head * a.group;
        const long long begin = static_cast<long long>(piece) * 2 * stride + first_head;
        const int column = lane * 4 % HEAD;
        const float* partial = a.partial + begin * HEAD + column;
        float4 parts[MAX_GROUP][2];
#pragma unroll
        for (int row = 0; row < MAX_GROUP; ++row)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (row < a.group)
                    parts[row][i] = __ldcg(
                        reinterpret_cast<const float4*>(partial + (i * stride + row) * HEAD));
        const int row = lane % MAX_GROUP, of_side = lane / MAX_GROUP % 2;
        const float log_sum = row < a.group ? __ldcg(a.log_sums + begin + of_side * stride + row)
                                            : minus_infinity();
        const float most = fmaxf(log_sum, __shfl_xor_sync(~0u, log_sum, MAX_GROUP));
        const float own = weight_of(log_sum, most);
#pragma unroll
        for (int i = 0; i < MAX_GROUP; ++i) {
            const float near = __shfl_sync(~0u, own, i);
            const float far = __shfl_sync(~0u, own, i + MAX_GROUP);
            if (i >= a.group) continue;
            float4 value = make_float4(0, 0, 0, 0);
            add(value, near, parts[i][0]);
            add(value, far, parts[i][1]);
            store_mean(sequence, first_head + i, column, value, near + far);
        }
    }

private:
    // A side or a piece without keys weighs nothing.
    __device__ __forceinline__ static float weight_of(float log_sum, float most) {
        return log_sum > minus_infinity() ? exp2_fast(log_sum - most) : 0;
    }

    __device__ __forceinline__ static void add(float4& sum, float weight, float4 part) {
        sum.x += weight * part.x;
        sum.y += weight * part.y;
        sum.z += weight * part.z;
        sum.w += weight * part.w;
    }

    __device__ __forceinline__ void store_mean(int sequence, int head, int column, float4 sum,
                                               float all) const {
        const float scale = all > 0 ? 1 / all : 0;
        store(sequence, head * HEAD + column,
              make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale));
    }
};

// The warp that weighs sides: of each piece the block counts its own result, and whoever counts
// last weighs all of the sequence.
template <bool IS_BF16, int HEAD>
struct Weigher {
    using S = Shape<HEAD>;
    Results<IS_BF16, HEAD> results;
    u32 shared;
    char* memory;

    // What all threads of the block wrote before they passed the piece on is written for
    // whoever sees this count: each of them arrived at a barrier that this thread waited at.
    __device__ __forceinline__ int count_one(int* counter) const {
        int before;
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                     : "=r"(before)
                     : "l"(counter)
                     : "memory");
        return before;
    }

    __device__ void take(const Ended& ended) {
        const Arguments& a = results.a;
        int is_last = 0;
        if (results.lane == 0) {
            int* counter = a.counters + ended.sequence * a.kv_heads + results.kv_head;
            is_last = count_one(counter) == 2 * ended.count - 1;
            if (is_last) *counter = 0;
        }
        __syncwarp();
        if (!__shfl_sync(~0u, is_last, 0)) return;
        if (ended.count == 1) {
            results.weigh_two(ended.number, ended.sequence);
            return;
        }
        for (int row = 0; row < a.group; ++row)
            results.weigh(ended.first, ended.count, ended.sequence,
                          results.kv_head * a.group + row);
    }

    __device__ void take_all() {
        bool is_final = false;
        for (u32 slot = 0, parity = 0; !is_final;) {
            const u32 full = shared + S::ENDED_BARRIERS + slot * 8;
            barrier_wait(full, parity);
            const Ended ended = reinterpret_cast<const Ended*>(memory + S::ENDED)[slot];
            __syncwarp();
            if (results.lane == 0) barrier_arrive(full + QUEUED * 8);
            if (ended.number >= 0) take(ended);
            is_final = ended.is_final;
            if (++slot == QUEUED) {
                slot = 0;
                parity ^= 1;
            }
        }
    }
};

}  // namespace
