// Operators on each token: normalisation, activation, rotation, storing KV.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "api.h"
#include "pool.h"
#include "vec.h"

namespace trimaran {
namespace {

// Below this many elements a second thread costs more than it saves.
constexpr long kElementsOfItem = 16384;

template <class F>
void each_row(long rows, long width, F&& body) {
  long step = std::max(1l, kElementsOfItem / std::max(1l, width));
  Pool::get().each((rows + step - 1) / step, [&](long item) {
    long end = std::min(rows, (item + 1) * step);
    for (long row = item * step; row < end; ++row) body(row);
  });
}

// Calls body(first, mask) for each vector of a row.
template <class F>
INLINE void each_vector(long width, F&& body) {
  long i = 0;
  for (; i + 16 <= width; i += 16) body(i, (__mmask16)0xffff);
  if (i < width) body(i, mask_of(width - i));
}

template <class T>
void norm_row(const NormArgs& a, long row) {
  const T* x = (const T*)a.x + row * a.x_stride;
  T* residual = a.residual ? (T*)a.residual + row * a.residual_stride : nullptr;
  const T* source = residual ? residual : x;
  const T *weight = (const T*)a.weight, *bias = (const T*)a.bias;
  T* y = (T*)a.y + row * a.width;
  __m512 sum = _mm512_setzero_ps(), squares = sum;
  each_vector(a.width, [&](long i, __mmask16 m) {
    __m512 v = load(x + i, m);
    if (residual) {
      v = rounded(_mm512_add_ps(v, load(residual + i, m)), x);
      store(residual + i, v, m);
    }
    sum = _mm512_add_ps(sum, v);
    squares = _mm512_fmadd_ps(v, v, squares);
  });
  float mean = 0.0f;
  if (bias) {
    mean = sum1(sum) / a.width;
    squares = _mm512_setzero_ps();
    each_vector(a.width, [&](long i, __mmask16 m) {
      __m512 v = _mm512_maskz_sub_ps(m, load(source + i, m), _mm512_set1_ps(mean));
      squares = _mm512_fmadd_ps(v, v, squares);
    });
  }
  __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(sum1(squares) / a.width + (float)a.eps));
  each_vector(a.width, [&](long i, __mmask16 m) {
    __m512 v = _mm512_sub_ps(load(source + i, m), _mm512_set1_ps(mean));
    v = _mm512_mul_ps(_mm512_mul_ps(v, scale), load(weight + i, m));
    store(y + i, bias ? _mm512_add_ps(v, load(bias + i, m)) : v, m);
  });
}

INLINE __m512 sigmoid(__m512 x) {
  __m512 one = _mm512_set1_ps(1.0f);
  __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(one, _mm512_add_ps(one, e));
}

template <class T>
void silu_row(const ActivationArgs& a, long row) {
  const T* gate = (const T*)a.x + row * 2 * a.width;
  T* y = (T*)a.y + row * a.width;
  each_vector(a.width, [&](long i, __mmask16 m) {
    __m512 g = load(gate + i, m);
    __m512 v = _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(g)), load(gate + a.width + i, m));
    store(y + i, v, m);
  });
}

template <class T>
void gelu_row(const ActivationArgs& a, long row) {
  const T* x = (const T*)a.x + row * a.width;
  T* y = (T*)a.y + row * a.width;
  // 0.5 (1 + tanh u) is sigmoid(2 u).
  const __m512 twice = _mm512_set1_ps(2.0f * 0.7978845608028654f);
  const __m512 cubic = _mm512_set1_ps(0.044715f);
  each_vector(a.width, [&](long i, __mmask16 m) {
    __m512 v = load(x + i, m);
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(v, v), v);
    __m512 u = _mm512_mul_ps(twice, _mm512_fmadd_ps(cubic, cube, v));
    store(y + i, _mm512_mul_ps(v, sigmoid(u)), m);
  });
}

template <class T>
void clamped_row(const ClampedSwigluArgs& a, long row) {
  const T* gate = (const T*)a.x + row * 2 * a.width;
  const T* up = gate + a.width;
  T* y = (T*)a.y + row * a.width;
  const __m512 limit = _mm512_set1_ps((float)a.limit), least = _mm512_set1_ps(-(float)a.limit);
  const __m512 alpha = _mm512_set1_ps((float)a.alpha), one = _mm512_set1_ps(1.0f);
  each_vector(a.width, [&](long i, __mmask16 m) {
    // A minimum or maximum with NaN is the second operand.
    __m512 g = _mm512_min_ps(limit, load(gate + i, m));
    __m512 u = _mm512_max_ps(least, _mm512_min_ps(limit, load(up + i, m)));
    __m512 glu = _mm512_mul_ps(g, sigmoid(_mm512_mul_ps(alpha, g)));
    store(y + i, _mm512_mul_ps(glu, _mm512_add_ps(u, one)), m);
  });
}

template <class T>
void rotate_token(const RotateArgs& a, long token) {
  long half = a.head_size / 2;
  const float* cos = a.cos_sin + a.positions[token] * a.head_size;
  const float* sin = cos + half;
  for (long head = 0; head < a.heads; ++head) {
    T* x = (T*)a.x + token * a.token_stride + head * a.head_size;
    each_vector(half, [&](long i, __mmask16 m) {
      __m512 first = load(x + i, m), second = load(x + half + i, m);
      __m512 c = load(cos + i, m), s = load(sin + i, m);
      // Products rounded before the sum, as in the definition.
      __m512 a0 = _mm512_mul_ps(first, c), b0 = _mm512_mul_ps(second, s);
      __m512 a1 = _mm512_mul_ps(second, c), b1 = _mm512_mul_ps(first, s);
      store(x + i, _mm512_sub_ps(a0, b0), m);
      store(x + half + i, _mm512_add_ps(a1, b1), m);
    });
  }
}

template <class T>
void write_token(const WriteKvArgs& a, long token) {
  long block = a.slots[token] / a.block_size, offset = a.slots[token] % a.block_size;
  T* key = (T*)a.cache + block * a.block_stride + offset * a.width;
  T* value = key + a.block_size * a.width;
  std::memcpy(key, (const T*)a.key + token * a.key_stride, a.width * sizeof(T));
  std::memcpy(value, (const T*)a.value + token * a.value_stride, a.width * sizeof(T));
}

// Calls body with a null pointer of the type of a dtype code.
template <class F>
void with_type(long dtype, F&& body) {
  switch (dtype) {
    case kFloat32: return body((float*)nullptr);
    case kBfloat16: return body((bf16*)nullptr);
    default: return body((f16*)nullptr);
  }
}

}  // namespace
}  // namespace trimaran

using namespace trimaran;

extern "C" void trimaran_norm(const NormArgs* a) {
  with_type(a->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    each_row(a->rows, a->width, [&](long row) { norm_row<T>(*a, row); });
  });
}

extern "C" void trimaran_activation(const ActivationArgs* a) {
  with_type(a->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    each_row(a->rows, a->width, [&](long row) {
      if (a->is_gelu)
        gelu_row<T>(*a, row);
      else
        silu_row<T>(*a, row);
    });
  });
}

extern "C" void trimaran_clamped_swiglu(const ClampedSwigluArgs* a) {
  with_type(a->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    each_row(a->rows, a->width, [&](long row) { clamped_row<T>(*a, row); });
  });
}

extern "C" void trimaran_rotate(const RotateArgs* a) {
  with_type(a->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    each_row(a->tokens, a->heads * a->head_size,
             [&](long token) { rotate_token<T>(*a, token); });
  });
}

extern "C" void trimaran_write_kv(const WriteKvArgs* a) {
  with_type(a->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    each_row(a->tokens, a->width, [&](long token) { write_token<T>(*a, token); });
  });
}

extern "C" void trimaran_set_num_threads(long num_threads) {
  Pool::get().resize((int)num_threads);
}
