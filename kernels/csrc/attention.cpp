// Causal attention over a paged cache: decodes and prompt chunks in one call.
//
// A piece of work is a few queries of one sequence against one key-value head. Their scores
// are kept whole, so softmax is exact, and each query's result depends on its own keys only.
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"
#include "pool.h"
#include "vec.h"

namespace trimaran {
namespace {

constexpr int kMaxRows = 6;
constexpr int kRowsOfPiece = 24;
constexpr int kMaxVectors = 4;

struct Piece {
  int sequence, kv_head, first_query, num_queries;
};

template <class T>
class Attention {
 public:
  explicit Attention(const AttentionArgs& a)
      : a_(a),
        group_(a.heads / a.kv_heads),
        token_stride_(a.kv_heads * a.head_size),
        value_offset_(a.block_size * token_stride_) {}

  void run() const {
    std::vector<Piece> pieces;
    int queries = std::max(1l, kRowsOfPiece / group_);
    for (int s = 0; s < a_.sequences; ++s) {
      int count = a_.query_start_loc[s + 1] - a_.query_start_loc[s];
      for (int q = 0; q < count; q += queries)
        for (int h = 0; h < a_.kv_heads; ++h)
          pieces.push_back({s, h, q, std::min(queries, count - q)});
    }
    Pool::get().each(pieces.size(), [&](long i) { attend(pieces[i]); });
  }

 private:
  // The rows of a piece are its queries times the heads of the group.
  void attend(const Piece& piece) const {
    thread_local std::vector<T> query;
    thread_local std::vector<float> scores, factors;
    long rows = piece.num_queries * group_;
    long size = a_.head_size;
    long first_token = a_.query_start_loc[piece.sequence] + piece.first_query;
    long count = a_.query_start_loc[piece.sequence + 1] - a_.query_start_loc[piece.sequence];
    long past = a_.seq_lens[piece.sequence] - count + piece.first_query;
    long keys = past + piece.num_queries;
    long stride = (keys + 15) / 16 * 16;
    query.resize(rows * size);
    scores.resize(rows * stride);
    factors.resize(rows);
    for (long row = 0; row < rows; ++row)
      std::copy_n(query_at(piece, first_token, row), size, query.data() + row * size);
    for (long row = 0; row < rows; row += kMaxRows) {
      long batch = std::min<long>(kMaxRows, rows - row);
      float* out = scores.data() + row * stride;
      score_rows(piece, batch, query.data() + row * size, keys, out, stride);
    }
    for (long row = 0; row < rows; ++row)
      factors[row] = softmax(scores.data() + row * stride, past + row / group_ + 1, stride);
    for (long row = 0; row < rows; row += kMaxRows) {
      long batch = std::min<long>(kMaxRows, rows - row);
      mix_rows(piece, first_token, row, batch, keys, scores.data() + row * stride, stride,
               factors.data() + row);
    }
  }

  const T* query_at(const Piece& piece, long first_token, long row) const {
    long head = piece.kv_head * group_ + row % group_;
    return (const T*)a_.query + (first_token + row / group_) * a_.query_stride +
           head * a_.head_size;
  }

  const T* block_at(const Piece& piece, long block) const {
    long number = a_.block_tables[piece.sequence * a_.table_stride + block];
    return (const T*)a_.cache + number * a_.block_stride + piece.kv_head * a_.head_size;
  }

  void score_rows(const Piece& piece, long rows, const T* query, long keys, float* scores,
                  long stride) const {
    for (long first = 0; first < keys; first += a_.block_size) {
      const T* key = block_at(piece, first / a_.block_size);
      long count = std::min(a_.block_size, keys - first);
      switch (rows) {
        case 1: score_block<1>(query, key, count, scores + first, stride); break;
        case 2: score_block<2>(query, key, count, scores + first, stride); break;
        case 3: score_block<3>(query, key, count, scores + first, stride); break;
        case 4: score_block<4>(query, key, count, scores + first, stride); break;
        case 5: score_block<5>(query, key, count, scores + first, stride); break;
        default: score_block<6>(query, key, count, scores + first, stride);
      }
    }
  }

  template <int R>
  void score_block(const T* query, const T* key, long count, float* scores,
                   long stride) const {
    long size = a_.head_size, t = 0;
    for (; t + 4 <= count; t += 4) {
      __m128 sums[R][1];
      dot_tile<T, R, 1>(query, size, key + t * token_stride_, token_stride_, size, sums);
      for (int r = 0; r < R; ++r) _mm_storeu_ps(scores + r * stride + t, sums[r][0]);
    }
    for (; t < count; ++t)
      for (int r = 0; r < R; ++r)
        scores[r * stride + t] = dot(query + r * size, key + t * token_stride_, size);
  }

  // Scores become weights, zero from `keys` to `stride`; returns what they sum to, inverted.
  float softmax(float* scores, long keys, long stride) const {
    __m512 scale = _mm512_set1_ps((float)a_.scale);
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (long i = 0; i < keys; i += 16) {
      __mmask16 m = keys - i >= 16 ? 0xffff : mask_of(keys - i);
      __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, scores + i), scale);
      top = _mm512_mask_max_ps(top, m, top, v);
      _mm512_mask_storeu_ps(scores + i, m, v);
    }
    __m512 max = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < stride; i += 16) {
      __mmask16 m = keys - i >= 16 ? 0xffff : keys > i ? mask_of(keys - i) : 0;
      __m512 v = exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(m, scores + i), max));
      v = _mm512_maskz_mov_ps(m, v);
      sum = _mm512_add_ps(sum, v);
      _mm512_storeu_ps(scores + i, v);
    }
    return 1.0f / sum1(sum);
  }

  void mix_rows(const Piece& piece, long first_token, long first_row, long rows, long keys,
                const float* weights, long stride, const float* factors) const {
    for (long dim = 0; dim < a_.head_size; dim += 16 * kMaxVectors) {
      float out[kMaxRows][16 * kMaxVectors];
      switch (rows) {
        case 1: mix<1>(piece, dim, keys, weights, stride, out); break;
        case 2: mix<2>(piece, dim, keys, weights, stride, out); break;
        case 3: mix<3>(piece, dim, keys, weights, stride, out); break;
        case 4: mix<4>(piece, dim, keys, weights, stride, out); break;
        case 5: mix<5>(piece, dim, keys, weights, stride, out); break;
        default: mix<6>(piece, dim, keys, weights, stride, out);
      }
      long width = std::min<long>(16 * kMaxVectors, a_.head_size - dim);
      for (long r = 0; r < rows; ++r) {
        long row = first_row + r;
        long head = piece.kv_head * group_ + row % group_;
        T* y = (T*)a_.output +
               ((first_token + row / group_) * a_.heads + head) * a_.head_size + dim;
        for (long i = 0; i < width; i += 16) {
          __m512 v = _mm512_mul_ps(load(out[r] + i), _mm512_set1_ps(factors[r]));
          store(y + i, v, width - i >= 16 ? (__mmask16)0xffff : mask_of(width - i));
        }
      }
    }
  }

  // Weighted sums of values [dim, dim + 64) for R rows.
  template <int R>
  void mix(const Piece& piece, long dim, long keys, const float* weights, long stride,
           float out[kMaxRows][16 * kMaxVectors]) const {
    __mmask16 masks[kMaxVectors];
    for (int v = 0; v < kMaxVectors; ++v) {
      long left = a_.head_size - dim - 16 * v;
      masks[v] = left >= 16 ? 0xffff : left > 0 ? mask_of(left) : 0;
    }
    __m512 acc[R][kMaxVectors];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kMaxVectors; ++v) acc[r][v] = _mm512_setzero_ps();
    for (long first = 0; first < keys; first += a_.block_size) {
      const T* value = block_at(piece, first / a_.block_size) + value_offset_ + dim;
      long count = std::min(a_.block_size, keys - first);
      for (long t = 0; t < count; ++t, value += token_stride_) {
        __m512 values[kMaxVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kMaxVectors; ++v) values[v] = load(value + 16 * v, masks[v]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          __m512 weight = _mm512_set1_ps(weights[r * stride + first + t]);
#pragma GCC unroll 4
          for (int v = 0; v < kMaxVectors; ++v)
            acc[r][v] = _mm512_fmadd_ps(weight, values[v], acc[r][v]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kMaxVectors; ++v) _mm512_storeu_ps(out[r] + 16 * v, acc[r][v]);
  }

  const AttentionArgs& a_;
  const long group_, token_stride_, value_offset_;
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
