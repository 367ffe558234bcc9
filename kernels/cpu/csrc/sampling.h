// The sampling kernels' C interface, as Python calls it.
#pragma once

#include <cstdint>

extern "C" {

// The first index of each row's largest value.
struct ArgmaxArgs {
  const float* logits;
  int64_t* ids;
  long rows, vocab, row_stride;
};
void trimaran_argmax(const ArgmaxArgs* args);

// One draw a row: temperature, then top-k, top-p and min-p, then Gumbel noise by the row's key.
struct SampleArgs {
  const float* logits;
  int64_t* ids;
  const float* params;   // [rows, 3]: temperature, top-p, min-p
  const int64_t* top_k;  // [rows], 0: all
  const int32_t* keys;   // [rows, 2]
  long rows, vocab, row_stride;
};
void trimaran_sample(const SampleArgs* args);

// table[places[i]] = ids[i]
struct StoreIdsArgs {
  const int64_t *ids, *places;
  int32_t* table;
  long count;
};
void trimaran_store_ids(const StoreIdsArgs* args);
}
