// A decode step's inputs from numbers that come with the launch: no copy from the host precedes
// the kernel. One block; thread e makes the inputs of entry e. `StepTensors` in
// triton/inputs.py describes `wide` and `narrow`, and `prepare` there makes the same inputs of
// any step.
//
// MAX_ROWS: threads of the block. MAX_BLOCKS: most changes of block tables.
#ifndef DECODE_INPUTS_PRIMITIVES
#include "cluster.cuh"
#endif

namespace {

struct Entry {
    int row;
    int computed;  // tokens of the row before the step's token
};

struct NewBlock {
    int place;  // in the block tables
    int block;
};

struct Arguments {
    int* token_table;   // [rows, row_len]
    int* block_tables;  // [rows, max_blocks]
    long long* wide;    // [5, wide_stride]
    int* narrow;        // [7, narrow_stride]
    const int* shifts;  // [rows], or null
    int row_len;
    int max_blocks;
    int block_size;
    int spare_row;
    int wide_stride;
    int narrow_stride;
    int num_entries;
    int num_padded;  // at most MAX_ROWS
    int num_blocks;
    int ring_slot;
    Entry entries[MAX_ROWS];
    NewBlock new_blocks[MAX_BLOCKS];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(MAX_ROWS)
    decode_inputs(const __grid_constant__ Arguments step) {
    wait_for_previous_kernels();
    const int entry = threadIdx.x;
    for (int index = entry; index < step.num_blocks; index += MAX_ROWS) {
        step.block_tables[step.new_blocks[index].place] = step.new_blocks[index].block;
    }
    // A token's slot may lie in a new block.
    __syncthreads();
    if (entry >= step.num_padded) return;
    const bool is_real = entry < step.num_entries;
    const int row = is_real ? step.entries[entry].row : step.spare_row;
    const int computed = is_real ? step.entries[entry].computed : 0;
    const long long place = static_cast<long long>(row) * step.row_len + computed;
    const long long table = static_cast<long long>(row) * step.max_blocks;
    const long long block = step.block_tables[table + computed / step.block_size];
    const int shift = step.shifts == nullptr ? 0 : step.shifts[row];
    const long long wide = step.wide_stride, narrow = step.narrow_stride;
    step.wide[entry] = computed + shift;
    step.wide[wide + entry] = block * step.block_size + computed % step.block_size;
    step.wide[2 * wide + entry] = entry;
    // No step reads the last id of row 0.
    step.wide[3 * wide + entry] = is_real ? place + 1 : step.row_len - 1;
    step.narrow[entry] = step.token_table[place];
    step.narrow[narrow + entry] = row;
    step.narrow[2 * narrow + entry] = computed + 1;
    step.narrow[3 * narrow + entry] = entry;
    step.narrow[4 * narrow + entry] = is_real ? row : -1;
    step.narrow[5 * narrow + entry] = computed + 1;
    if (entry == step.num_padded - 1) step.narrow[3 * narrow + step.num_padded] = entry + 1;
    if (entry == 0) {
        step.narrow[6 * narrow] = step.num_entries;
        step.narrow[6 * narrow + 1] = step.ring_slot;
    }
}
