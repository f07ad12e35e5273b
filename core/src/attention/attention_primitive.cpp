// Evaluates the attention primitive: prepares buffers and strides, and calls the kernel.
#include "attention/attention_primitive.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "attention/attention_kernel.h"
#include "cpu/array_memory.h"
#include "cpu/checks.h"
#include "cpu/donation.h"
#include "cpu/element_type.h"
#include "cpu/encoder.h"
#include "cpu/strided_copy.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

// Fills in one side except for its addresses.
kernels::Packing packing_of(const mx::array* rows, int arrays, int bits, int group_size, int width,
                            uint32_t seed) {
  kernels::Packing packing;
  if (arrays == 1) return packing;
  packing.bits = bits;
  packing.type = element_type(rows[1].dtype());
  copy_strides(rows[1], 3, packing.scale_strides);
  if (arrays == 2) {
    packing.group_size = width;
    packing.codes = &kernels::codebook(width, bits, seed);
    return packing;
  }
  packing.group_size = group_size;
  copy_strides(rows[2], 3, packing.bias_strides);
  return packing;
}

}  // namespace

std::vector<mx::Shape> Attention::output_shapes(const std::vector<mx::array>& inputs) {
  const mx::Shape& q = inputs[0].shape();
  const mx::Shape& k = inputs[1].shape();
  const int words = inputs[values_at()].shape(3);
  const int width = settings_.value_arrays == 1 ? words : words * 32 / settings_.v_bits;
  std::vector<mx::Shape> shapes{{q[0], q[1], q[2], width}};
  if (settings_.return_scores) shapes.push_back({q[0], q[1], q[2], k[2]});
  if (settings_.return_lse) shapes.push_back({q[0], q[1], q[2]});
  if (settings_.return_skipped) shapes.push_back({q[0], q[1], q[2]});
  if (settings_.has_importance) shapes.push_back(inputs[importance_at()].shape());
  return shapes;
}

void Attention::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  release_sibling_inputs(inputs, outputs);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  const bool accumulates = settings_.has_importance;
  const bool in_place = accumulates && take_over(inputs[importance_at()], outputs.back());
  const size_t made = outputs.size() - (accumulates ? 1 : 0);
  for (size_t i = 0; i < made; ++i) allocate(outputs[i]);
  std::vector<mx::array> held;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_row_bias = settings_.has_row_bias && i + 1 == inputs.size();
    const bool has_unit_stride = i < importance_at() || is_row_bias;
    held.push_back(has_unit_stride ? with_unit_last_stride(inputs[i], encoder) : inputs[i]);
  }
  const mx::array& queries = held[0];
  const mx::array* keys = &held[1];
  const mx::array* values = &held[values_at()];

  kernels::AttentionArguments a{};
  static_cast<AttentionNumbers&>(a) = settings_;
  a.batch = queries.shape(0);
  a.query_heads = queries.shape(1);
  a.kv_heads = keys->shape(1);
  a.query_count = queries.shape(2);
  a.key_count = keys->shape(2);
  a.width = queries.shape(3);
  a.value_width = outputs[0].shape(3);
  a.type = element_type(queries.dtype());
  a.accumulate = accumulates;
  a.mass = accumulates && !settings_.decay.has_value();
  if (settings_.decay.has_value()) a.decay = kernels::Decay::of(*settings_.decay);
  copy_strides(queries, 3, a.query_strides);
  copy_strides(*keys, 3, a.key_strides);
  copy_strides(*values, 3, a.value_strides);
  a.key_packing = packing_of(keys, settings_.key_arrays, settings_.bits, settings_.group_size,
                             a.width, kernels::kKeySeed);
  a.value_packing = packing_of(values, settings_.value_arrays, settings_.v_bits,
                               settings_.group_size, a.value_width, kernels::kValueSeed);
  size_t next_input = importance_at() + (accumulates ? 1 : 0);
  if (settings_.has_mask) {
    const mx::array& mask = held[next_input++];
    a.mask_type = mask_type(mask.dtype());
    a.mask_threshold = mask_threshold(mask.dtype());
    copy_strides(mask, 4, a.mask_strides);
  }
  if (settings_.has_sinks) a.sink_stride = held[next_input++].strides(0);
  if (settings_.has_row_bias) copy_strides(held[next_input], 2, a.row_bias_strides);
  held.insert(held.end(), outputs.begin(), outputs.end());
  // One extent of an array has 31 bits, so a large workspace has two.
  const size_t floats = kernels::attention_workspace_size(a);
  const size_t width = floats >> 31 == 0 ? 1 : 1 << 15;
  const auto lines = static_cast<int>(std::min<size_t>((floats + width - 1) / width, INT32_MAX));
  mx::array workspace({lines, static_cast<int>(width)}, mx::float32, nullptr, {});
  allocate(workspace);
  encoder.add_temporary(workspace);
  held.push_back(std::move(workspace));

  // The stream keeps the buffers of inputs, outputs and temporaries until its tasks are done, so
  // the task holds none. It reads their addresses only when it runs, when the inputs are evaluated.
  for (mx::array& array : held) array = mx::array::unsafe_weak_copy(array);
  encoder.dispatch([a, held = std::move(held), settings = settings_, in_place,
                    target = kernels::simd_target()]() mutable {
    auto next = held.begin();
    a.queries = (next++)->data<void>();
    a.keys = (next++)->data<void>();
    if (settings.key_arrays > 1) a.key_packing.scales = (next++)->data<void>();
    if (settings.key_arrays > 2) a.key_packing.biases = (next++)->data<void>();
    a.values = (next++)->data<void>();
    if (settings.value_arrays > 1) a.value_packing.scales = (next++)->data<void>();
    if (settings.value_arrays > 2) a.value_packing.biases = (next++)->data<void>();
    auto importance = next;
    if (a.accumulate) ++next;
    if (settings.has_mask) a.mask = (next++)->data<void>();
    if (settings.has_sinks) a.sinks = (next++)->data<float>();
    if (settings.has_row_bias) a.row_bias = (next++)->data<float>();
    a.out = (next++)->data<void>();
    if (settings.return_scores) a.scores = (next++)->data<float>();
    if (settings.return_lse) a.lse = (next++)->data<float>();
    if (settings.return_skipped) a.skipped = (next++)->data<float>();
    if (a.accumulate) {
      a.importance_rows = next->shape(2);
      a.importance = (next++)->data<float>();
      if (!in_place) copy_elements(*importance, a.importance);
    }
    kernels::attention(a, target, next->data<float>());
  });
}

}  // namespace mlx_h2o
