// Whole decoder layers in one call: the same kernels in the same order as single calls, without
// returning to the caller after each.
#include <algorithm>
#include <cstring>
#include <vector>

#include "api.h"

namespace {

class Decoder {
 public:
  explicit Decoder(const DecoderArgs& a)
      : a_(a),
        item_(a.dtype == kFloat32 ? 4 : 2),
        query_width_(a.heads * a.head_size),
        kv_width_(a.kv_heads * a.head_size),
        qkv_width_(query_width_ + 2 * kv_width_),
        up_width_(a.is_gelu ? a.inner : 2 * a.inner) {}

  void run() {
    // Kept for the next step: one caller at a time.
    static std::vector<char> memory;
    long widest = a_.hidden + query_width_ + a_.inner + std::max(qkv_width_, up_width_);
    memory.resize(a_.rows * widest * item_);
    normed_ = memory.data();
    attended_ = normed_ + a_.rows * a_.hidden * item_;
    activated_ = attended_ + a_.rows * query_width_ * item_;
    wide_ = activated_ + a_.rows * a_.inner * item_;
    for (long half = a_.first_half; half < a_.end_half; ++half) {
      const DecoderLayer& layer = a_.layers[half / 2];
      if (half % 2 == 0)
        attention(layer, half == 0);
      else
        mlp(layer);
    }
  }

 private:
  void attention(const DecoderLayer& layer, bool is_first) {
    if (is_first) {
      // No addend yet: the input is the residual.
      std::memcpy(a_.residual, a_.x, a_.rows * a_.hidden * item_);
      norm(a_.x, nullptr, layer.attention_norm, layer.attention_norm_bias);
    } else {
      norm(a_.x, a_.residual, layer.attention_norm, layer.attention_norm_bias);
    }
    linear(normed_, layer.qkv, layer.integers & 1, layer.qkv_bias, wide_, a_.hidden, qkv_width_);
    if (a_.cos_sin) {
      RotateArgs rotate{a_.dtype, wide_, a_.cos_sin, a_.positions,
                        a_.rows, a_.heads + a_.kv_heads, a_.head_size, qkv_width_};
      trimaran_rotate(&rotate);
    }
    char* key = wide_ + query_width_ * item_;
    WriteKvArgs write{a_.dtype, key, key + kv_width_ * item_, layer.cache, a_.slots,
                      a_.rows, kv_width_, qkv_width_, qkv_width_, a_.block_size,
                      a_.block_stride};
    trimaran_write_kv(&write);
    AttentionArgs attend{a_.dtype, wide_, layer.cache, attended_, a_.query_start_loc,
                         a_.seq_lens, a_.block_tables, a_.sequences, a_.heads, a_.kv_heads,
                         a_.head_size, a_.block_size, qkv_width_, a_.block_stride,
                         a_.table_stride, 0, 0, 0, nullptr, 0, kAsQueries, nullptr, nullptr,
                         a_.tree_masks, a_.scale, 0.0};
    trimaran_attention(&attend);
    linear(attended_, layer.out, layer.integers & 2, layer.out_bias, a_.x, query_width_,
           a_.hidden);
  }

  void mlp(const DecoderLayer& layer) {
    norm(a_.x, a_.residual, layer.mlp_norm, layer.mlp_norm_bias);
    linear(normed_, layer.up, layer.integers & 4, layer.up_bias, wide_, a_.hidden, up_width_);
    ActivationArgs activation{a_.dtype, a_.is_gelu, wide_, activated_, a_.rows, a_.inner};
    trimaran_activation(&activation);
    linear(activated_, layer.down, layer.integers & 8, layer.down_bias, a_.x, a_.inner,
           a_.hidden);
  }

  void norm(const void* x, void* residual, const void* weight, const void* bias) {
    NormArgs args{a_.dtype, x, weight, bias, residual, normed_,
                  a_.rows, a_.hidden, a_.hidden, a_.hidden, a_.eps};
    trimaran_norm(&args);
  }

  void linear(const void* x, const void* weight, bool has_integers, const void* bias, void* y,
              long k, long outputs) {
    if (has_integers) {
      IntegerArgs args{a_.dtype, 0, x, (const IntegerWeights*)weight, bias, y, a_.rows, k};
      return trimaran_integer_linear(&args);
    }
    LinearArgs args{a_.dtype, 0, x, weight, bias, y, a_.rows, k, outputs, k};
    trimaran_linear(&args);
  }

  const DecoderArgs& a_;
  const long item_, query_width_, kv_width_, qkv_width_, up_width_;
  char *normed_, *attended_, *activated_, *wide_;
};

}  // namespace

extern "C" void trimaran_decoder(const DecoderArgs* args) { Decoder(*args).run(); }
