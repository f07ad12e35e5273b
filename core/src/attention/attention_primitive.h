// The MLX primitive of attention: its inputs, outputs and options.
#pragma once

#include <optional>
#include <vector>

#include "cpu/cpu_primitive.h"
#include "mlx_h2o/attention_numbers.h"

namespace mlx_h2o {

/// The options of one attention, beside its arrays.
struct AttentionSettings : AttentionNumbers {
  int key_arrays, value_arrays;  // 1: dense; 2: words and norms; 3: words, scales and biases
  int bits, v_bits, group_size;  // bits are 0 if the rows are not packed
  bool has_importance, has_mask, has_sinks, has_row_bias;
  std::optional<double> decay;  // of the importance; none: it is a mass

  bool operator==(const AttentionSettings&) const = default;
};

/// Inputs: queries, the arrays of keys and of values, then, if present, the importance [B, Hkv, N],
/// the mask [B, Hq, Lq, N], the float32 sinks and the row bias. Outputs: out, then, if requested,
/// scores, lse, the share skipped and the new importance, in the buffer of its input if nothing
/// else holds it.
class Attention : public CpuPrimitive {
 public:
  Attention(mlx::core::Stream stream, const char* operation, AttentionSettings settings)
      : CpuPrimitive(stream, operation), settings_(settings) {}

  void eval_cpu(const std::vector<mlx::core::array>& inputs,
                std::vector<mlx::core::array>& outputs) override;

  const char* name() const override {
    return settings_.has_importance  ? "AttentionAndAccumulate"
           : settings_.v_bits != 0   ? "QuantizedAttention"
           : settings_.return_scores ? "AttentionWithScores"
                                     : "Attention";
  }

  bool is_equivalent(const Primitive& other) const override {
    return settings_ == static_cast<const Attention&>(other).settings_;
  }

  std::vector<mlx::core::Shape> output_shapes(const std::vector<mlx::core::array>& inputs) override;

 private:
  size_t values_at() const { return 1 + static_cast<size_t>(settings_.key_arrays); }
  size_t importance_at() const { return values_at() + static_cast<size_t>(settings_.value_arrays); }

  AttentionSettings settings_;
};

}  // namespace mlx_h2o
