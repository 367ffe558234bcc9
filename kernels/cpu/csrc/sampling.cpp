// Choosing a token id for each row of logits; a row is one work item.
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
        top_p_(a.params[3 * row + 1] < 1.0f ? a.params[3 * row + 1] : INFINITY),
        min_p_(a.params[3 * row + 2]),
        top_k_(a.top_k[row] < a.vocab ? a.top_k[row] : 0),
        noise_{(uint32_t)a.keys[2 * row], (uint32_t)a.keys[2 * row + 1]} {}

  long draw() {
    bool has_filter = top_k_ > 0 || top_p_ < 1 || min_p_ > 0;
    if (!has_filter) return draw_from(INT64_MIN);
    if (top_k_ > 0) {
      find_largest(top_k_);
      return draw_candidates(mass_of_candidates());
    }
    if (4 * kFew > vocab_) {
      find_largest(vocab_);
      return draw_candidates(mass_of_candidates());
    }
    find_largest(kFew);
    double total = fill_masses();
    if (mass_of_candidates() > (top_p_ + 1e-5) * total || mass_of(candidates_.back()) < min_p_)
      return draw_candidates(total);
    return draw_from(last_kept(total));
  }

 private:
  INLINE __m512i orders_at(long i, __mmask16 here) const {
    __m512i bits = _mm512_castps_si512(load(logits_ + i, here));
    __m512i flip = _mm512_and_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(kIdBits));
    return _mm512_xor_si512(bits, flip);
  }
  INLINE __mmask16 mask_at(long i) const {
    return vocab_ - i < 16 ? mask_of(vocab_ - i) : (__mmask16)0xffff;
  }
  // Orders like (logit, inverted id); all keys of a row differ.
  INLINE static int64_t key_of(float logit, uint32_t id) {
    return (int64_t)((uint64_t)(uint32_t)order_of(logit) << 32 | (kIdBits - id));
  }

  // A draw among the ids whose key is at least `lowest`. Noise is bounded by the exponent of
  // its uniform number, so logarithms are taken only of ids that may win.
  long draw_from(int64_t lowest) const {
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
        if (score > best && key_of(logits_[start + i], (uint32_t)(start + i)) >= lowest) {
          best = score;
          best_id = start + i;
        }
      }
    }
    return best_id;
  }

  // At least `count` ids are at or above the count-th largest of the group maxima.
  int32_t bound_of(long count) {
    long depth = std::min({kMaxDepth, vocab_ / (2 * count), vocab_ / 16});
    long groups = vocab_ / depth / 16;  // of 16 lanes
    maxima_.resize(16 * groups);
    for (long g = 0; g < groups; ++g) {
      __m512i most = orders_at(16 * g, 0xffff);
      for (long d = 1; d < depth; ++d)
        most = _mm512_max_epi32(most, orders_at(16 * (d * groups + g), 0xffff));
      _mm512_storeu_si512(maxima_.data() + 16 * g, most);
    }
    auto place = maxima_.begin() + (count - 1);
    std::nth_element(maxima_.begin(), place, maxima_.end(), std::greater<int32_t>());
    return *place;
  }

  // Fills candidates_ with the `count` largest, descending; on ties the lower id first.
  void find_largest(long count) {
    keys_.clear();
    bool has_few = count >= 1 && 4 * count + 64 <= vocab_;
    const __m512i bounds = _mm512_set1_epi32(has_few ? bound_of(count) : INT32_MIN);
    for (long i = 0; i < vocab_; i += 16) {
      __mmask16 here = mask_at(i);
      uint32_t chosen = _mm512_mask_cmpge_epi32_mask(here, orders_at(i, here), bounds);
      for (; chosen; chosen &= chosen - 1) {
        long id = i + __builtin_ctz(chosen);
        keys_.push_back(key_of(logits_[id], (uint32_t)id));
      }
    }
    std::sort(keys_.begin(), keys_.end(), std::greater<int64_t>());
    keys_.resize(std::min<size_t>(count, keys_.size()));
    candidates_.clear();
    for (int64_t key : keys_)
      candidates_.push_back(
          {value_of((int32_t)(key >> 32)) / temperature_, kIdBits - (uint32_t)key});
  }

  // The key of the last id that top-p and min-p keep, by halving the ids around pivots.
  int64_t last_kept(double total) {
    keys_.resize(vocab_);
    for (long i = 0; i < vocab_; ++i) keys_[i] = key_of(logits_[i], (uint32_t)i);
    auto mass = [this](int64_t key) { return (double)masses_[kIdBits - (uint32_t)key]; };
    auto first = keys_.begin(), end = keys_.end();
    double before = 0;
    while (end - first > 64) {
      auto middle = first + (end - first) / 2;
      std::nth_element(first, middle, end, std::greater<int64_t>());
      double upper = 0;
      for (auto it = first; it != middle; ++it) upper += mass(*it);
      // The first id below the middle has the largest mass of its half.
      if (before + upper >= top_p_ * total || mass(*middle) < min_p_) {
        end = middle;
      } else {
        before += upper;
        first = middle;
      }
    }
    std::sort(first, end, std::greater<int64_t>());
    int64_t last = INT64_MAX;
    if (first != keys_.begin()) last = *std::min_element(keys_.begin(), first);
    for (auto it = first; it != end; ++it) {
      bool is_first = it == keys_.begin();
      if (!is_first && (before >= top_p_ * total || mass(*it) < min_p_)) break;
      before += mass(*it);
      last = *it;
    }
    return last;
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
  // Writes the masses of all ids to masses_; returns their sum.
  double fill_masses() {
    masses_.resize(vocab_);
    const __m512 most = _mm512_set1_ps(candidates_[0].value);
    const __m512 temperature = _mm512_set1_ps(temperature_);
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    for (long i = 0; i < vocab_; i += 16) {
      __mmask16 here = mask_at(i);
      __m512 v = _mm512_div_ps(load(logits_ + i, here), temperature);
      v = _mm512_maskz_mov_ps(here, exp16(_mm512_sub_ps(v, most)));
      store(masses_.data() + i, v, here);
      __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
      low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
      high = _mm512_add_pd(high, _mm512_cvtps_pd(upper));
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
  }

  // Cuts the tail by top-p of `total` and by min-p; the likeliest id always stays.
  long draw_candidates(double total) const {
    double before = 0;
    float best = -INFINITY;
    long best_id = candidates_[0].id;
    for (size_t i = 0; i < candidates_.size(); ++i) {
      const Candidate& c = candidates_[i];
      double mass = mass_of(c);
      if (i > 0 && (before >= top_p_ * total || mass < min_p_)) break;
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

  static thread_local std::vector<int32_t> maxima_;
  static thread_local std::vector<int64_t> keys_;
  static thread_local std::vector<float> masses_;
  static thread_local std::vector<Candidate> candidates_;
};

thread_local std::vector<int32_t> Row::maxima_;
thread_local std::vector<int64_t> Row::keys_;
thread_local std::vector<float> Row::masses_;
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

void trimaran_store_ids(const StoreIdsArgs* args) {
  for (long i = 0; i < args->count; ++i) args->table[args->places[i]] = (int32_t)args->ids[i];
}
