// The kernels' C interface, as Python calls it. Lengths and strides count elements.
#pragma once

#include <cstdint>

enum DType { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// Numbers of a cache: those of the queries, or of one byte with a scale for each head.
enum CacheType { kAsQueries = 0, kFloat8 = 1, kInt8 = 2 };

extern "C" {

struct LinearArgs {
  long dtype, float_output;
  const void *x, *weight, *bias;
  void* y;
  long rows, k, outputs, x_stride;
};
void trimaran_linear(const LinearArgs* args);

// Weights of integers in blocks of 16 outputs; `integers.cpp` has the order of the values.
struct IntegerWeights {
  // Signed bytes, or unsigned halves of bytes.
  const void* values;
  // [blocks, num_scales, 16]. A weight is integer * scale + offset; without offsets the integer
  // 8 of 4 bits stands for zero.
  const float *scales, *offsets;
  // The input of each of k columns, or -1 for a column of padding; null: the inputs in order.
  const int32_t* order;
  // First column, number of columns and place of the scale of each segment.
  const int32_t* segments;
  // Whether halves of bytes are codes of FP4 numbers; scales are then of twice the numbers.
  long bits, k, num_segments, num_scales, outputs, is_fp4, has_byte_inputs;
  // The scale of byte inputs; 0: each row has its own.
  double input_scale;
};
struct IntegerArgs {
  long dtype, float_output;
  const void* x;
  const IntegerWeights* weight;
  const void* bias;
  void* y;
  long rows, x_stride;
};
void trimaran_integer_linear(const IntegerArgs* args);

// Whether these products use tile instructions for many rows.
long trimaran_has_integer_tiles();

// Whether products of bf16 use tile instructions.
long trimaran_has_amx();

// Normalises rows of x, or of residual after adding x to it. bias null: root mean square.
struct NormArgs {
  long dtype;
  const void *x, *weight, *bias;
  void *residual, *y;
  long rows, width, x_stride, residual_stride;
  double eps;
};
void trimaran_norm(const NormArgs* args);

// silu(gate) * up of rows [gate | up], or gelu (tanh form) of rows where is_gelu is set.
struct ActivationArgs {
  long dtype, is_gelu;
  const void* x;
  void* y;
  long rows, width;
};
void trimaran_activation(const ActivationArgs* args);

// gate * sigmoid(alpha * gate) * (up + 1) of rows [gate | up], gates clamped to limit from above,
// ups from both sides.
struct ClampedSwigluArgs {
  long dtype;
  const void* x;
  void* y;
  long rows, width;
  double alpha, limit;
};
void trimaran_clamped_swiglu(const ClampedSwigluArgs* args);

// Rotates `heads` heads of each token in place.
struct RotateArgs {
  long dtype;
  void* x;
  const float* cos_sin;
  const int64_t* positions;
  long tokens, heads, head_size, token_stride;
};
void trimaran_rotate(const RotateArgs* args);

// Stores keys and values of each token at its slot of the cache [blocks, 2, B, heads * size].
struct WriteKvArgs {
  long dtype;
  const void *key, *value;
  void* cache;
  const int64_t* slots;
  long tokens, width, key_stride, value_stride, block_size, block_stride;
};
void trimaran_write_kv(const WriteKvArgs* args);

struct AttentionArgs {
  long dtype;
  const void *query, *cache;
  void* output;
  const int32_t *query_start_loc, *seq_lens, *block_tables;
  long sequences, heads, kv_heads, head_size, block_size;
  long query_stride, block_stride, table_stride;
  // Tokens that a query sees, its own the last (0: all), and sinks, which it sees in any case.
  long window, num_sinks;
  // Dims of a key, from the first on, that are its value (0: values lie behind the keys).
  long latent_size;
  // Added to a head's scores of the key at a position, [heads, bias_stride]; or null.
  const float* position_bias;
  long bias_stride;
  long cache_type;
  // Scales of each head's keys, then of each head's values; null with kAsQueries.
  const float* kv_scales;
  // A score of each head in the denominator of its softmax, of no key; or null.
  const float* sink_logits;
  // A word of each sequence with one query: bit i says whether the query sees the key i tokens
  // before its own, for the last 64 keys; or null, when all are seen.
  const int64_t* tree_masks;
  double scale, soft_cap;  // a cap of 0 leaves scores as they are
};
void trimaran_attention(const AttentionArgs* args);

// One layer's weights; a null bias is absent, a null norm bias makes the norm one of root
// mean squares.
struct DecoderLayer {
  const void *attention_norm, *attention_norm_bias, *qkv, *qkv_bias, *out, *out_bias;
  const void *mlp_norm, *mlp_norm_bias, *up, *up_bias, *down, *down_bias;
  void* cache;
  // A bit for each of qkv, out, up and down, from the lowest: the weight is IntegerWeights.
  long integers;
};

struct DecoderArgs {
  long dtype, is_gelu;
  const DecoderLayer* layers;
  // Halves of layers to run, [first, end): 2 n is the attention of layer n, 2 n + 1 its MLP.
  long first_half, end_half;
  // Rows of hidden states. In: to be added to residual. Out: the same, after the last half.
  void *x, *residual;
  long rows, hidden, inner, heads, kv_heads, head_size;
  const float* cos_sin;  // null: no rotation
  const int64_t *positions, *slots;
  const int32_t *query_start_loc, *seq_lens, *block_tables;
  long sequences, block_size, block_stride, table_stride;
  const int64_t* tree_masks;  // see AttentionArgs
  double scale, eps;
};
void trimaran_decoder(const DecoderArgs* args);

// Threads of every later call, the caller included.
void trimaran_set_num_threads(long num_threads);

}
