// Choosing a token id for each row of logits, a row a piece of work.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace trimaran {
namespace {

constexpr long kFew = 256;
constexpr long kMoreTimes = 8;
constexpr long kMaxDepth = 32;
constexpr long kBlock = 256;
constexpr uint32_t kIdBits = 0x7fffffff;

// int32 that order like the floats; NaN above all.
INLINE int32_t order_of(float v) {
  int32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
INLINE float value_of(int32_t order) {
  int32_t bits = order ^ ((order >> 31) & 0x7fffffff);
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

// The noise of one row: a hash of its key and a token id, as Gumbel noise.
struct Noise {
  uint32_t first, second;

  // Uniform in (0, 1), fine-grained near 0.
  INLINE float uniform(uint32_t id) const {
    uint32_t x = (id * 0x9e3779b1u) ^ first;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = ((x ^ (x >> 15)) ^ second) * 0x846ca68bu;
    x = (x ^ (x >> 16)) & 0x7fffffffu;
    float u = ((float)(int32_t)x + 0.5f) * 0x1p-31f;
    return u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f;
  }
  static float gumbel(float uniform) { return -logf(-log1pf(-uniform)); }
};

struct Candidate {
  float value;
  uint32_t id;
};

class Row {
 public:
  Row(const SampleArgs& a, long row)
      : logits_(a.logits + row * a.row_stride),
        vocab_(a.vocab),
        temperature_(a.params[3 * row]),
        top_p_(a.params[3 * row + 1]),
        min_p_(a.params[3 * row + 2]),
        top_k_(a.top_k[row] < a.vocab ? a.top_k[row] : 0),
        noise_{(uint32_t)a.keys[2 * row], (uint32_t)a.keys[2 * row + 1]} {}

  long draw() {
    if (top_k_ == 0 && top_p_ >= 1.0f && min_p_ <= 0.0f) return draw_any();
    order_all();
    if (top_k_ > 0) {
      find_largest(top_k_);
      return draw_candidates(mass_of_candidates());
    }
    double total = -1;
    for (long count = kFew; 4 * count <= vocab_; count *= kMoreTimes) {
      find_largest(count);
      if (total < 0) total = mass_of_all();
      double last = std::exp((double)(candidates_.back().value - candidates_[0].value));
      if (mass_of_candidates() > (top_p_ + 1e-5) * total || last < min_p_)
        return draw_candidates(total);
    }
    find_largest(vocab_);
    return draw_candidates(mass_of_candidates());
  }

 private:
  // The whole softmax. Noise is bounded by the exponent of its uniform number, so logarithms
  // are taken only of ids that may win.
  long draw_any() const {
    float best = -INFINITY;
    long best_id = 0;
    float values[kBlock], uniforms[kBlock], bounds[kBlock];
    for (long start = 0; start < vocab_; start += kBlock) {
      long count = std::min(kBlock, vocab_ - start);
      for (long i = 0; i < count; ++i) {
        values[i] = logits_[start + i] / temperature_;
        uniforms[i] = noise_.uniform((uint32_t)(start + i));
        int32_t bits;
        std::memcpy(&bits, &uniforms[i], 4);
        bounds[i] = values[i] + (float)(127 - (bits >> 23)) * 0.6931472f + 1e-3f;
      }
      for (long i = 0; i < count; ++i) {
        if (!(bounds[i] > best)) continue;
        float score = Noise::gumbel(uniforms[i]) + values[i];
        if (score > best) {
          best = score;
          best_id = start + i;
        }
      }
    }
    return best_id;
  }

  void order_all() {
    orders_.resize(vocab_);
    for (long i = 0; i < vocab_; ++i) orders_[i] = order_of(logits_[i] / temperature_);
  }

  // At least `count` ids are at or above the count-th largest of the groups' largest.
  int32_t bound_of(long count) {
    long depth = std::min(kMaxDepth, vocab_ / (2 * count));
    long groups = vocab_ / depth;
    maxima_.assign(orders_.begin(), orders_.begin() + groups);
    for (long d = 1; d < depth; ++d) {
      const int32_t* next = orders_.data() + d * groups;
      for (long g = 0; g < groups; ++g) maxima_[g] = std::max(maxima_[g], next[g]);
    }
    auto place = maxima_.begin() + (count - 1);
    std::nth_element(maxima_.begin(), place, maxima_.end(), std::greater<int32_t>());
    return *place;
  }

  // Fills candidates_ with the `count` largest, descending; of equals the lower id first.
  void find_largest(long count) {
    keys_.clear();
    int32_t bound = 4 * count <= vocab_ ? bound_of(count) : INT32_MIN;
    const __m512i bounds = _mm512_set1_epi32(bound);
    for (long i = 0; i < vocab_; i += 16) {
      __mmask16 here = vocab_ - i < 16 ? mask_of(vocab_ - i) : (__mmask16)0xffff;
      __m512i v = _mm512_maskz_loadu_epi32(here, orders_.data() + i);
      uint32_t chosen = _mm512_mask_cmpge_epi32_mask(here, v, bounds);
      for (; chosen; chosen &= chosen - 1) add_key(i + __builtin_ctz(chosen));
    }
    std::sort(keys_.begin(), keys_.end(), std::greater<int64_t>());
    candidates_.resize(std::min<long>(count, (long)keys_.size()));
    for (size_t i = 0; i < candidates_.size(); ++i)
      candidates_[i] = {value_of((int32_t)(keys_[i] >> 32)), kIdBits - (uint32_t)keys_[i]};
  }

  void add_key(long id) {
    keys_.push_back((int64_t)((uint64_t)(uint32_t)orders_[id] << 32 | (kIdBits - (uint32_t)id)));
  }

  // Masses are relative to the likeliest id's.
  double mass_of(const Candidate& c) const {
    return std::exp((double)(c.value - candidates_[0].value));
  }
  double mass_of_candidates() const {
    double sum = 0;
    for (const Candidate& c : candidates_) sum += mass_of(c);
    return sum;
  }
  double mass_of_all() const {
    const __m512 most = _mm512_set1_ps(candidates_[0].value);
    const __m512 temperature = _mm512_set1_ps(temperature_);
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    for (long i = 0; i < vocab_; i += 16) {
      __mmask16 here = vocab_ - i < 16 ? mask_of(vocab_ - i) : (__mmask16)0xffff;
      __m512 v = _mm512_div_ps(load(logits_ + i, here), temperature);
      v = _mm512_maskz_mov_ps(here, exp16(_mm512_sub_ps(v, most)));
      low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
      high = _mm512_add_pd(
          high, _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1))));
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
  }

  // Cuts the tail by top-p of `total` and by min-p; the likeliest always stays.
  long draw_candidates(double total) const {
    double before = 0;
    float best = -INFINITY;
    long best_id = candidates_[0].id;
    for (size_t i = 0; i < candidates_.size(); ++i) {
      const Candidate& c = candidates_[i];
      double mass = mass_of(c);
      if (i > 0 && ((top_p_ < 1.0f && before >= top_p_ * total) || mass < min_p_)) break;
      before += mass;
      float score = Noise::gumbel(noise_.uniform(c.id)) + c.value;
      if (score > best) {
        best = score;
        best_id = c.id;
      }
    }
    return best_id;
  }

  const float* logits_;
  long vocab_;
  float temperature_;
  double top_p_, min_p_;
  long top_k_;
  Noise noise_;

  static thread_local std::vector<int32_t> orders_, maxima_;
  static thread_local std::vector<int64_t> keys_;
  static thread_local std::vector<Candidate> candidates_;
};

thread_local std::vector<int32_t> Row::orders_, Row::maxima_;
thread_local std::vector<int64_t> Row::keys_;
thread_local std::vector<Candidate> Row::candidates_;

long argmax(const float* logits, long vocab) {
  __m512 most = _mm512_set1_ps(-INFINITY);
  for (long i = 0; i < vocab; i += 16) {
    __mmask16 here = vocab - i < 16 ? mask_of(vocab - i) : (__mmask16)0xffff;
    most = _mm512_mask_max_ps(most, here, most, load(logits + i, here));
  }
  const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  for (long i = 0; i < vocab; i += 16) {
    __mmask16 here = vocab - i < 16 ? mask_of(vocab - i) : (__mmask16)0xffff;
    uint32_t found = _mm512_mask_cmp_ps_mask(here, load(logits + i, here), largest, _CMP_EQ_OQ);
    if (found) return i + __builtin_ctz(found);
  }
  return 0;
}

}  // namespace
}  // namespace trimaran

void trimaran_argmax(const ArgmaxArgs* args) {
  const ArgmaxArgs& a = *args;
  trimaran::Pool::get().each(a.rows, [&](long row) {
    a.ids[row] = trimaran::argmax(a.logits + row * a.row_stride, a.vocab);
  });
}

void trimaran_sample(const SampleArgs* args) {
  trimaran::Pool::get().each(args->rows,
                             [&](long row) { args->ids[row] = trimaran::Row(*args, row).draw(); });
}
