// Results of a decode's attention: the columns of splits, and the sums over a sequence's splits.
#pragma once

#include "decode_bytes.cuh"
#include "decode_splits.cuh"

namespace {

// A base of the multiplying warps. S is their `Shape`.
template <bool IS_BF16, int HEAD, typename S>
struct SplitSums {
    const Arguments& a;
    char* memory;
    int warp, lane;

    // Columns that the queries of a split fill.
    template <typename OWNER>
    __device__ __forceinline__ int columns_of(const OWNER& owner) const {
        return S::SHARES ? owner.queries * a.group : a.group;
    }

    __device__ __forceinline__ int token_of(int column) const {
        return S::SHARES ? column / a.group : 0;
    }

    // The mask of a column's query, with TREES.
    __device__ __forceinline__ u64 mask_of(const Tile& tile, int column) const {
        const int own = S::SHARES ? sequence_of(tile, token_of(column)) : tile.sequence;
        return __ldcg(a.tree_masks + own);
    }

    // Four numbers of a head of a query, by all lanes of a warp.
    __device__ __forceinline__ void store(int sequence, int place, float4 value) const {
        if constexpr (HEAD == kGroup) {
            if (a.quantization.scales) {
                store_quantized(sequence, place, value);
                return;
            }
        }
        char* to = static_cast<char*>(a.output) + 2 * (sequence * a.output_stride + place);
        *reinterpret_cast<uint2*>(to) =
            make_uint2(pack<IS_BF16>(value.x, value.y), pack<IS_BF16>(value.z, value.w));
    }

    __device__ __forceinline__ void store_quantized(int sequence, int place,
                                                    float4 value) const {
        const float2 first = unpack<IS_BF16>(pack<IS_BF16>(value.x, value.y));
        const float2 last = unpack<IS_BF16>(pack<IS_BF16>(value.z, value.w));
        float peak = larger(larger(0.0f, first), last);
        for (int i = 16; i > 0; i /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, i));
        const float scale = scale_of(a.quantization, peak);
        const float inverse = __fdiv_rn(1.0f, scale);
        char* to = static_cast<char*>(a.output) + sequence * a.output_stride + place;
        *reinterpret_cast<u32*>(to) =
            two_bytes(first, inverse) | two_bytes(last, inverse) << 16;
        if (place % kGroup == 0)
            a.quantization.scales[place / kGroup * a.quantization.pitch + sequence] = scale;
    }

    // Counts two splits, of these `heads`, as done; the last warp of a sequence combines all of
    // its splits.
    __device__ void finish(int first, int last, int heads) {
        int* flags = reinterpret_cast<int*>(memory + S::FLAGS);
        __threadfence();
        named_wait(IS_FREE, CONSUMERS);
        if (warp < 2 && lane == 0) {
            const int number = warp == 0 ? first : last;
            const Split split = read_split<S::SHARES>(a, number);
            int is_last = 0;
            if (split.count > 1 && (warp == 0 || first != last)) {
                int* counter = a.counters + split.sequence * a.kv_heads +
                               (warp == 0 ? heads >> 16 : heads & 0xFFFF);
                is_last = atomicAdd(counter, 1) == split.count - 1;
                if (is_last) *counter = 0;
            }
            flags[warp] = is_last;
            __threadfence();
        }
        named_wait(IS_THERE, CONSUMERS);
        for (int i = 0; i < 2; ++i) {
            if (flags[i] == 0) continue;
            const int number = i == 0 ? first : last;
            const Split split = read_split<S::SHARES>(a, number);
            const int head = i == 0 ? heads >> 16 : heads & 0xFFFF;
            const int columns = columns_of(split);
            // Partial results of the sequence's first split.
            const int partial = split.partial - (number - split.first) * split.queries;
            for (int column = warp; column < columns; column += CONSUMER_WARPS) {
                const int token = token_of(column);
                const int sequence = S::SHARES ? sequence_of(split, token) : split.sequence;
                weigh_splits(split, sequence, partial + token,
                             head * a.group + column - token * a.group);
            }
        }
    }

    // `first` is the partial result of the query's first split.
    __device__ __forceinline__ void weigh_splits(const Split& split, int sequence, int first,
                                                 int head) {
        const int all_heads = a.kv_heads * a.group, heads = all_heads * split.queries;
        const long long own = static_cast<long long>(first) * all_heads + head;
        const float* log_sums = a.log_sums + own;
        float most = minus_infinity();
        for (int i = lane; i < split.count; i += 32)
            most = fmaxf(most, __ldcg(log_sums + static_cast<long long>(i) * heads));
        for (int i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
        // With heads below 128, two lanes share some of the columns.
        const int column = lane * 4 % HEAD;
        const float* partial = a.partial + own * HEAD + column;
        float4 value = make_float4(0, 0, 0, 0);
        float all = 0;
        for (int base = 0; base < split.count; base += 32) {
            const int number = min(32, split.count - base);
            float weight_of_lane = 0;
            if (lane < number) {
                const long long of_lane = static_cast<long long>(base + lane) * heads;
                weight_of_lane = exp2_fast(__ldcg(log_sums + of_lane) - most);
            }
#pragma unroll 16
            for (int i = 0; i < number; ++i) {
                const float weight = __shfl_sync(~0u, weight_of_lane, i);
                const float4 part = __ldcg(reinterpret_cast<const float4*>(
                    partial + static_cast<long long>(base + i) * heads * HEAD));
                value.x += weight * part.x;
                value.y += weight * part.y;
                value.z += weight * part.z;
                value.w += weight * part.w;
                all += weight;
            }
        }
        const float scale = 1 / all;
        store(sequence, head * HEAD + column,
              make_float4(value.x * scale, value.y * scale, value.z * scale, value.w * scale));
    }
};

}  // namespace
