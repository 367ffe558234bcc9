// Causal attention of many queries a sequence over a paged cache of keys and values.
//
// The design follows FlashAttention 3 (Shah et al., 2024): one warp copies tiles to shared
// memory, two warpgroups multiply. Within a warpgroup the scores of the next keys are computed
// while the softmax of the current keys runs, and the two warpgroups alternate at the tensor
// cores.
//
// A tile is 128 rows: `step` consecutive queries of one sequence times the `group` heads that
// share a key-value head. 128 keys are one step of its loop, from the last to the first.
//
// PREFILL_HEAD: the head size, 64 or 128. PREFILL_BF16: bfloat16 (true) or float16 (false).
// WINDOW: each query sees `window` keys, its own the last, and `num_sinks` first ones.

#include "attention_copies.cuh"
#include "attention_products.cuh"

namespace {

template <bool IS_BF16, int HEAD>
__device__ __forceinline__ void prefill(const TensorMap* queries, const TensorMap* cache,
                                        const Arguments& arguments) {
    using S = Shape<HEAD>;
    extern __shared__ unsigned char memory[];
    // Swizzles and barriers of copies need tiles at multiples of 1,024 bytes.
    const u32 start = shared_address(memory);
    const u32 base = (start + 1023) & ~1023u;
    Item* items = reinterpret_cast<Item*>(memory + (base - start) + S::ITEMS);
    if (threadIdx.x == 0) {
        prefetch_map(queries);
        prefetch_map(cache);
        Rings<HEAD>(base).init();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        give_registers<24>();
        if (threadIdx.x < 32) produce<HEAD>(base, items, queries, cache, arguments);
    } else {
        take_registers<240>();
        Consumer<IS_BF16, HEAD>(base, arguments.scale_log2).run(items, arguments);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    attend(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap cache,
           const __grid_constant__ Arguments arguments) {
    prefill<PREFILL_BF16, PREFILL_HEAD>(&queries, &cache, arguments);
}

// ---- The plan of a step, made once for all layers.

namespace {

constexpr int PLANNERS = 1024;

struct PlanArguments {
    const int* query_start_loc;
    const int* seq_lens;
    const int* rows;  // or null: sequence s has row s
    Tile* tiles;
    int num_sequences;
    int step;
};

__device__ __forceinline__ int bin_of(int position, int num_queries) {
    // The longest tiles first, so that short ones fill the end of the launch.
    return max(PLANNERS - (position + num_queries + KEYS - 1) / KEYS, 0);
}

}  // namespace

// One block: lists the tiles of all sequences, sorted by the number of keys.
extern "C" __global__ void __launch_bounds__(PLANNERS)
    plan_prefill(const __grid_constant__ PlanArguments plan) {
    __shared__ int places[PLANNERS];
    __shared__ int sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    places[threadIdx.x] = 0;
    __syncthreads();
    for (int pass = 0; pass < 2; ++pass) {
        for (int s = warp; s < plan.num_sequences; s += 32) {
            const int first = plan.query_start_loc[s];
            const int count = plan.query_start_loc[s + 1] - first;
            const int past = plan.seq_lens[s] - count;
            const int row = plan.rows == nullptr ? s : plan.rows[s];
            for (int at = lane * plan.step; at < count; at += 32 * plan.step) {
                const int num_queries = min(plan.step, count - at);
                const int place = atomicAdd(places + bin_of(past + at, num_queries), 1);
                const int behind = min(count - at - num_queries, KEYS);
                if (pass == 0) continue;
                plan.tiles[1 + place] =
                    Tile{first + at, num_queries | behind << 16, past + at, row};
            }
        }
        __syncthreads();
        if (pass == 1) return;
        const int own = places[threadIdx.x];
        int sum = own;
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) sums[warp] = sum;
        __syncthreads();
        for (int w = 0; w < warp; ++w) sum += sums[w];
        places[threadIdx.x] = sum - own;
        if (threadIdx.x == PLANNERS - 1) plan.tiles[0] = Tile{sum, 0, 0, 0};
        __syncthreads();
    }
}
