// Causal attention over a paged cache: decodes and prompt chunks in one call.
//
// A work item is one query of a sequence against several key-value heads, or a few queries
// against one head. All scores of a query are stored, so softmax is exact, and each query's
// result depends on its own keys only.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "api.h"
#include "kv_bytes.h"
#include "pool.h"
#include "vec.h"

namespace trimaran {
namespace {

constexpr int kMaxRows = kMaxSums / 4;
constexpr int kRowsOfItem = 24;
constexpr int kMaxVectors = 4;

struct WorkItem {
  int sequence, first_head, num_heads, first_query, num_queries;
};

template <class T>
class Attention {
 public:
  explicit Attention(const AttentionArgs& a)
      : a_(a),
        group_(a.heads / a.kv_heads),
        size_(a.head_size),
        value_size_(a.latent_size > 0 ? a.latent_size : a.head_size),
        token_stride_(a.kv_heads * a.head_size),
        value_offset_(a.latent_size > 0 ? 0 : a.block_size * token_stride_) {}

  void run() const {
    std::vector<WorkItem> items;
    int queries = std::max(1l, kRowsOfItem / group_);
    // A decode takes all heads at once, since they are adjacent in memory, unless that leaves
    // threads idle.
    long shares = (2 * Pool::get().size() + a_.sequences - 1) / a_.sequences;
    int together = std::max(1l, a_.kv_heads / shares);
    for (int s = 0; s < a_.sequences; ++s) {
      int count = a_.query_start_loc[s + 1] - a_.query_start_loc[s];
      int heads = count == 1 ? together : 1;
      for (int q = 0; q < count; q += queries)
        for (int h = 0; h < a_.kv_heads; h += heads)
          items.push_back({s, h, std::min<int>(heads, a_.kv_heads - h), q,
                            std::min(queries, count - q)});
    }
    Pool::get().each(items.size(), [&](long i) { attend(items[i]); });
  }

 private:
  // One work item's position in the batch and its memory: for each head its rows, which are its
  // queries times the query heads of its group.
  struct Scratch {
    std::vector<T> query, block;
    std::vector<float> scores, output;
    long rows, keys, stride, past, first_token;
    // Whole blocks that some row sees: those before `sink_end`, and from `first_seen` on.
    long sink_end, first_seen;
    // Which of the last 64 keys a query in a tree sees, the lowest bit for the first of them.
    uint64_t tree;
  };

  void attend(const WorkItem& item) const {
    thread_local Scratch scratch;
    Scratch& s = scratch;
    const int32_t* starts = a_.query_start_loc + item.sequence;
    s.rows = item.num_queries * group_;
    s.first_token = starts[0] + item.first_query;
    s.past = a_.seq_lens[item.sequence] - (starts[1] - starts[0]) + item.first_query;
    s.keys = s.past + item.num_queries;
    s.tree = ~0ull;
    if (a_.tree_masks && starts[1] - starts[0] == 1) s.tree = reversed(a_.tree_masks[item.sequence]);
    s.stride = (s.keys + 15) / 16 * 16;
    s.first_seen = window_start(s.past) / a_.block_size * a_.block_size;
    s.sink_end = (a_.num_sinks + a_.block_size - 1) / a_.block_size * a_.block_size;
    long rows = item.num_heads * s.rows;
    s.query.resize(rows * size_);
    s.scores.resize(rows * s.stride);
    s.output.assign(rows * padded_size(), 0.0f);
    for (long row = 0; row < rows; ++row)
      std::copy_n((const T*)a_.query + place(item, s, row, a_.query_stride, size_), size_,
                  s.query.data() + row * size_);
    each_block(item, s, 0, [&](const T* key, long first, long count, long ahead) {
      score_block(item, s, key, first, count, ahead);
    });
    for (long row = 0; row < rows; ++row) {
      float factor = softmax(s.scores.data() + row * s.stride, s.past + row % s.rows / group_,
                             s.stride, head_of(item, s, row),
                             key_scale(item.first_head + row / s.rows), s.tree);
      // Stored behind the row's output.
      s.output[row * padded_size() + padded_size() - 16] = factor;
    }
    each_block(item, s, value_offset_, [&](const T* value, long first, long count, long ahead) {
      mix_block(item, s, value, first, count, ahead);
    });
    for (long row = 0; row < rows; ++row) finish(item, s, row);
  }

  // The first token that the query at a position sees, apart from the sinks.
  long window_start(long position) const {
    return a_.window > 0 ? std::max(0l, position + 1 - a_.window) : 0;
  }

  // Floats of one row's output, and one vector for its factor.
  long padded_size() const { return (value_size_ + 15) / 16 * 16 + 16; }

  // Where a row's query, or its output, starts among those of all tokens.
  long place(const WorkItem& item, const Scratch& s, long row, long token_stride,
             long size) const {
    long head = head_of(item, s, row);
    return (s.first_token + row % s.rows / group_) * token_stride + head * size;
  }

  long head_of(const WorkItem& item, const Scratch& s, long row) const {
    return (item.first_head + row / s.rows) * group_ + row % group_;
  }

  // The scales of a key-value head; those of keys are factors of scores, and those of values of
  // results.
  float key_scale(long head) const { return a_.kv_scales ? a_.kv_scales[head] : 1.0f; }
  float value_scale(long head) const {
    return a_.kv_scales ? a_.kv_scales[a_.kv_heads + head] : 1.0f;
  }

  const float* bias_of(long head) const {
    return a_.position_bias ? a_.position_bias + head * a_.bias_stride : nullptr;
  }

  // Calls body(memory, first token, tokens) for each visible block of keys, or of values
  // further on.
  template <class F>
  void each_block(const WorkItem& item, Scratch& s, long offset, F&& body) const {
    const int32_t* table = a_.block_tables + item.sequence * a_.table_stride;
    offset += item.first_head * size_;
    auto at = [&](long block) { return (const T*)a_.cache + table[block] * a_.block_stride; };
    long next;
    for (long first = s.sink_end > 0 ? 0 : s.first_seen; first < s.keys; first = next) {
      long block = first / a_.block_size;
      long count = std::min(a_.block_size, s.keys - first);
      next = first + a_.block_size;
      if (next >= s.sink_end) next = std::max(next, s.first_seen);
      long ahead = next < s.keys ? next / a_.block_size : block;
      if (a_.cache_type == kAsQueries)
        body(at(block) + offset, first, count, at(ahead) - at(block));
      else
        body(expand(item, s, table[block] * a_.block_stride + offset, count), first, count, 0);
    }
  }

  // The numbers of an item's heads of a block, without their scales: T holds them exactly.
  const T* expand(const WorkItem& item, Scratch& s, long from, long count) const {
    const T* values = values_of_bytes<T>(a_.cache_type);
    const uint8_t* bytes = (const uint8_t*)a_.cache + from;
    s.block.resize(a_.block_size * token_stride_);
    for (long t = 0; t < count; ++t)
      for (long i = t * token_stride_; i < t * token_stride_ + item.num_heads * size_; ++i)
        s.block[i] = values[bytes[i]];
    return s.block.data();
  }

  // Blocks are scattered, which hardware prefetching cannot predict: prefetch the next one.
  INLINE void fetch(const T* row) const {
    for (long byte = 0; byte < size_ * (long)sizeof(T); byte += 64)
      _mm_prefetch((const char*)row + byte, _MM_HINT_T0);
  }

  void score_block(const WorkItem& item, Scratch& s, const T* key, long first,
                   long count, long ahead) const {
    for (long head = 0; head < item.num_heads; ++head)
      for (long row = 0; row < s.rows; row += kMaxRows) {
        long at = head * s.rows + row;
        const T* query = s.query.data() + at * size_;
        float* scores = s.scores.data() + at * s.stride + first;
        with_rows(std::min<long>(kMaxRows, s.rows - row), [&](auto rows) {
          score<rows.value>(query, key + head * size_, count, scores, s.stride, ahead);
        });
      }
  }

  template <int R>
  void score(const T* query, const T* key, long count, float* scores, long stride,
             long ahead) const {
    long t = 0;
    for (; t + 4 <= count; t += 4) {
      for (int i = 0; i < 4; ++i) fetch(key + (t + i) * token_stride_ + ahead);
      __m128 sums[R][1];
      dot_tile<T, R, 1>(query, size_, key + t * token_stride_, token_stride_, size_, sums);
      for (int r = 0; r < R; ++r) _mm_storeu_ps(scores + r * stride + t, sums[r][0]);
    }
    for (; t < count; ++t)
      for (int r = 0; r < R; ++r)
        scores[r * stride + t] = dot(query + r * size_, key + t * token_stride_, size_);
  }

  // The first n of 16 lanes; n may be negative or above 16.
  static INLINE __mmask16 lanes(long n) { return n >= 16 ? 0xffff : n > 0 ? mask_of(n) : 0; }

  static uint64_t reversed(uint64_t word) {
    uint64_t result = 0;
    for (int bit = 0; bit < 64; ++bit) result |= (word >> bit & 1) << (63 - bit);
    return result;
  }

  // Which of the tokens i to i + 15 are visible to a query that sees [start, keys), apart from
  // the keys that its tree hides.
  INLINE __mmask16 seen(long i, long start, long keys, uint64_t tree) const {
    long in_tree = i + 64 - keys;
    __mmask16 shown = 0xffff;
    if (tree != ~0ull && in_tree > -16 && in_tree < 64)
      shown = in_tree >= 0 ? tree >> in_tree : tree << -in_tree | ((1u << -in_tree) - 1);
    if (i >= start && i + 16 <= keys) return shown;
    __mmask16 hidden = lanes(start - i) & ~lanes(a_.num_sinks - i);
    return lanes(keys - i) & ~hidden & shown;
  }

  // cap * tanh(x / cap), as 1 - 2 / (exp(2 x / cap) + 1).
  INLINE __m512 capped(__m512 x) const {
    __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
    __m512 e = exp16(_mm512_mul_ps(x, _mm512_set1_ps((float)(2.0 / a_.soft_cap))));
    __m512 tanh = _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(e, one)));
    return _mm512_mul_ps(tanh, _mm512_set1_ps((float)a_.soft_cap));
  }

  // Turns the scores of a head's query at a position into weights, zero for hidden keys; returns
  // the inverse of their sum, which has the weight of the head's sink logit if there is one.
  float softmax(float* scores, long position, long stride, long head, float key_scale,
                uint64_t tree) const {
    const float* bias = bias_of(head);
    __m512 scale = _mm512_set1_ps((float)a_.scale * key_scale);
    __m512 top = _mm512_set1_ps(a_.sink_logits ? a_.sink_logits[head] : -INFINITY);
    long keys = position + 1, start = window_start(position);
    for (long i = 0; i < keys; i += 16) {
      __mmask16 m = seen(i, start, keys, tree);
      __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, scores + i), scale);
      if (a_.soft_cap > 0) v = capped(v);
      if (bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(m, bias + i));
      top = _mm512_mask_max_ps(top, m, top, v);
      _mm512_mask_storeu_ps(scores + i, m, v);
    }
    __m512 max = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < stride; i += 16) {
      __mmask16 m = seen(i, start, keys, tree);
      __m512 v = exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(m, scores + i), max));
      v = _mm512_maskz_mov_ps(m, v);
      sum = _mm512_add_ps(sum, v);
      _mm512_storeu_ps(scores + i, v);
    }
    float total = sum1(sum);
    if (a_.sink_logits)
      total += _mm512_cvtss_f32(exp16(_mm512_sub_ps(_mm512_set1_ps(a_.sink_logits[head]), max)));
    return 1.0f / total;
  }

  void mix_block(const WorkItem& item, Scratch& s, const T* value, long first,
                 long count, long ahead) const {
    for (long head = 0; head < item.num_heads; ++head)
      for (long row = 0; row < s.rows; row += kMaxRows)
        for (long dim = 0; dim < value_size_; dim += 16 * kMaxVectors) {
          long at = head * s.rows + row;
          const float* weights = s.scores.data() + at * s.stride + first;
          float* output = s.output.data() + at * padded_size() + dim;
          with_rows(std::min<long>(kMaxRows, s.rows - row), [&](auto rows) {
            mix<rows.value>(value + head * size_ + dim, value_size_ - dim, count, weights,
                            s.stride, output, ahead);
          });
        }
  }

  // Adds weighted values to R rows of output, up to 64 elements of each.
  template <int R>
  void mix(const T* value, long width, long count, const float* weights, long stride,
           float* output, long ahead) const {
    __mmask16 masks[kMaxVectors];
    for (int v = 0; v < kMaxVectors; ++v) {
      long left = width - 16 * v;
      masks[v] = left >= 16 ? 0xffff : left > 0 ? mask_of(left) : 0;
    }
    long row = padded_size();
    __m512 acc[R][kMaxVectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kMaxVectors; ++v) acc[r][v] = load(output + r * row + 16 * v, masks[v]);
    for (long t = 0; t < count; ++t, value += token_stride_) {
      fetch(value + ahead);
      __m512 values[kMaxVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kMaxVectors; ++v) values[v] = load(value + 16 * v, masks[v]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        __m512 weight = _mm512_set1_ps(weights[r * stride + t]);
#pragma GCC unroll 4
        for (int v = 0; v < kMaxVectors; ++v)
          acc[r][v] = _mm512_fmadd_ps(weight, values[v], acc[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kMaxVectors; ++v) store(output + r * row + 16 * v, acc[r][v], masks[v]);
  }

  // Divides a row by its sum of weights and writes it out.
  void finish(const WorkItem& item, const Scratch& s, long row) const {
    const float* sums = s.output.data() + row * padded_size();
    __m512 factor =
        _mm512_set1_ps(sums[padded_size() - 16] * value_scale(item.first_head + row / s.rows));
    T* y = (T*)a_.output + place(item, s, row, a_.heads * value_size_, value_size_);
    for (long i = 0; i < value_size_; i += 16) {
      long left = value_size_ - i;
      __mmask16 m = left >= 16 ? (__mmask16)0xffff : mask_of(left);
      store(y + i, _mm512_mul_ps(load(sums + i, m), factor), m);
    }
  }

  // Calls body with the number of rows as a constant.
  template <class F>
  static INLINE void with_rows(long rows, F&& body) {
    switch (rows) {
      case 1: return body(std::integral_constant<int, 1>());
      case 2: return body(std::integral_constant<int, 2>());
      case 3: return body(std::integral_constant<int, 3>());
      case 4: return body(std::integral_constant<int, 4>());
      case 5: return body(std::integral_constant<int, 5>());
      default: return body(std::integral_constant<int, 6>());
    }
  }

  const AttentionArgs& a_;
  const long group_, size_, value_size_, token_stride_, value_offset_;
};

}  // namespace
}  // namespace trimaran

extern "C" void trimaran_attention(const AttentionArgs* args) {
  using namespace trimaran;
  switch (args->dtype) {
    case kFloat32: return Attention<float>(*args).run();
    case kBfloat16: return Attention<bf16>(*args).run();
    default: return Attention<f16>(*args).run();
  }
}
