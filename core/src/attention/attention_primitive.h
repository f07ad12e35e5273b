// Attention and the scores of a chunk as one operation: its inputs, outputs and settings.
#pragma once

#include <optional>
#include <vector>

#include "attention/attention_kernel.h"
#include "cpu/cpu_primitive.h"
#include "mlx_h2o/attention_numbers.h"

namespace mlx_h2o {

/// Inputs: queries, the arrays of keys and of values, then, if present, the row bias, the
/// importance [B, Hkv, N], the mask [B, Hq, Lq, N] and the float32 sinks. Outputs: out, then, if
/// requested, scores, lse, the share skipped and the new importance, in the buffer of its input if
/// nothing else holds it. Without values, the scores of a chunk: the new importance is the only
/// output.
struct Attention : CpuOperation, AttentionNumbers {
  size_t key_arrays, value_arrays;  // 1: dense; 2: words and norms; 3: words, scales and biases
  int bits, v_bits, group_size;     // bits are 0 if the rows are not packed
  bool has_row_bias, has_importance, has_mask, has_sinks;
  std::optional<double> decay;  // of the importance; none: it is a mass

  bool operator==(const Attention&) const = default;

  std::vector<mlx::core::Shape> output_shapes(const Arrays& inputs) const;
  Layout layout(size_t input) const {
    return input < importance_at() ? Layout::unit_last_stride : Layout::any;
  }
  int origin(size_t output) const {
    const size_t last = is_chunk() ? 0 : size_t{1} + return_scores + return_lse + return_skipped;
    return has_importance && output == last ? static_cast<int>(importance_at()) : -1;
  }
  size_t workspace_floats(const Arrays& inputs, const Arrays& outputs) const {
    return is_chunk() ? 0 : kernels::attention_workspace_size(sizes_of(inputs, outputs));
  }
  void run(Arrays& inputs, Arrays& outputs) const;

 private:
  bool is_chunk() const { return value_arrays == 0; }
  size_t importance_at() const { return 1 + key_arrays + value_arrays + has_row_bias; }
  kernels::AttentionArguments sizes_of(const Arrays& inputs, const Arrays& outputs) const;
};

}  // namespace mlx_h2o
