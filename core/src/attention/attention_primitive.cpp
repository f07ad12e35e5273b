// Passes the memory of the arrays of attention to the kernels.
#include "attention/attention_primitive.h"

#include <algorithm>
#include <limits>

#include "attention/prefill_kernel.h"
#include "cpu/element_type.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

// Where keys or values are, and how they are packed; moves on to the array after them.
kernels::Packing locate_rows(const mx::array*& next, size_t arrays, int bits, int group_size,
                             int width, uint32_t seed, const void*& first, int64_t (&strides)[3]) {
  kernels::Packing packing;
  if (arrays > 0) locate(*next++, first, strides);
  if (arrays < 2) return packing;
  packing.bits = bits;
  packing.type = element_type(next->dtype());
  locate(*next++, packing.scales, packing.scale_strides);
  if (arrays == 2) {
    packing.group_size = width;
    packing.codes = &kernels::codebook(width, bits, seed);
  } else {
    packing.group_size = group_size;
    locate(*next++, packing.biases, packing.bias_strides);
  }
  return packing;
}

}  // namespace

std::vector<mx::Shape> Attention::output_shapes(const Arrays& inputs) const {
  const mx::Shape& q = inputs[0].shape();
  const mx::Shape& k = inputs[1].shape();
  if (is_chunk()) return {{k[0], k[1], k[2]}};
  const int words = inputs[1 + key_arrays].shape(3);
  const int width = value_arrays == 1 ? words : words * 32 / v_bits;
  std::vector<mx::Shape> shapes{{q[0], q[1], q[2], width}};
  if (return_scores) shapes.push_back({q[0], q[1], q[2], k[2]});
  if (return_lse) shapes.push_back({q[0], q[1], q[2]});
  if (return_skipped) shapes.push_back({q[0], q[1], q[2]});
  if (has_importance) shapes.push_back(inputs[importance_at()].shape());
  return shapes;
}

kernels::AttentionArguments Attention::sizes_of(const Arrays& inputs, const Arrays& outputs) const {
  const mx::array &queries = inputs[0], &keys = inputs[1];
  kernels::AttentionArguments a{};
  static_cast<AttentionNumbers&>(a) = *this;
  a.batch = queries.shape(0);
  a.query_heads = queries.shape(1);
  a.kv_heads = keys.shape(1);
  a.query_count = queries.shape(2);
  a.key_count = keys.shape(2);
  a.width = queries.shape(3);
  a.value_width = is_chunk() ? 0 : outputs[0].shape(3);
  a.type = element_type(queries.dtype());
  a.accumulate = has_importance || is_chunk();
  a.mass = a.accumulate && !decay.has_value();
  if (decay.has_value()) a.decay = kernels::Decay::of(*decay);
  return a;
}

void Attention::run(Arrays& inputs, Arrays& outputs) const {
  kernels::AttentionArguments a = sizes_of(inputs, outputs);
  const mx::array* next = inputs.data();
  locate(*next++, a.queries, a.query_strides);
  a.key_packing = locate_rows(next, key_arrays, bits, group_size, a.width, kernels::kKeySeed,
                              a.keys, a.key_strides);
  a.value_packing = locate_rows(next, value_arrays, v_bits, group_size, a.value_width,
                                kernels::kValueSeed, a.values, a.value_strides);
  if (has_row_bias) locate(*next++, a.row_bias, a.row_bias_strides);
  if (has_importance) ++next;  // an output begins with it
  if (has_mask) {
    a.mask_is_boolean = next->dtype() == mx::bool_;
    a.mask_type = element_type(next->dtype());
    a.mask_threshold = mask_threshold(next->dtype());
    locate(*next++, a.mask, a.mask_strides);
  }
  if (has_sinks) {
    a.sink_stride = next->strides(0);
    a.sinks = next->data<float>();
  }

  mx::array* made = outputs.data();
  if (!is_chunk()) a.out = (made++)->data<void>();
  if (return_scores) a.scores = (made++)->data<float>();
  if (return_lse) a.lse = (made++)->data<float>();
  if (return_skipped) a.skipped = (made++)->data<float>();
  if (a.accumulate) {
    a.importance_rows = made->shape(2);
    a.importance = (made++)->data<float>();
  }
  if (!is_chunk()) return kernels::attention(a, kernels::simd_target(), made->data<float>());
  if (!has_importance && !a.mass) {
    std::fill_n(a.importance, outputs[0].size(), std::numeric_limits<float>::quiet_NaN());
  }
  kernels::prefill_scores(a, kernels::simd_target());
}

}  // namespace mlx_h2o
