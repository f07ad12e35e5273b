// The operation that sums the scores of a long chunk: checks, the MLX primitive, kernel call.
#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include <mlx/ops.h>

#include "attention/prefill_kernel.h"
#include "cpu/array_memory.h"
#include "cpu/checks.h"
#include "cpu/cpu_primitive.h"
#include "cpu/donation.h"
#include "cpu/element_type.h"
#include "cpu/encoder.h"
#include "cpu/strided_copy.h"
#include "mlx_h2o/ops.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kPrefillScores = "prefill_scores";

struct PrefillSettings {
  float scale;
  bool causal;
  std::optional<double> decay;  // of the average; none: the mass
  bool has_importance, has_mask, has_sinks, has_row_bias;

  bool operator==(const PrefillSettings& that) const = default;
};

/// Inputs: queries, keys, then, if present, importance float32 [B, H, N], the mask [B, Hq, Lq, N],
/// float32 sinks and the row bias. Output: float32 [B, H, N], in the buffer of the importance if
/// nothing else holds it.
class PrefillScores : public CpuPrimitive {
 public:
  PrefillScores(mx::Stream stream, PrefillSettings settings)
      : CpuPrimitive(stream, kPrefillScores), settings_(settings) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "PrefillScores"; }

  bool is_equivalent(const Primitive& other) const override {
    return settings_ == static_cast<const PrefillScores&>(other).settings_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const mx::Shape& keys = inputs[1].shape();
    return {{keys[0], keys[1], keys[2]}};
  }

 private:
  PrefillSettings settings_;
};

void PrefillScores::eval_cpu(const std::vector<mx::array>& inputs,
                             std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  const bool starts = settings_.has_importance;
  const bool in_place = starts && take_over(inputs[2], outputs[0]);
  if (!starts) allocate(outputs[0]);
  const mx::array queries = with_unit_last_stride(inputs[0], encoder);
  const mx::array keys = with_unit_last_stride(inputs[1], encoder);

  kernels::PrefillArguments call{};
  call.mass = !settings_.decay.has_value();
  kernels::AttentionArguments& a = call.attention;
  a.batch = queries.shape(0);
  a.query_heads = queries.shape(1);
  a.kv_heads = keys.shape(1);
  a.query_count = queries.shape(2);
  a.key_count = keys.shape(2);
  a.width = queries.shape(3);
  a.type = element_type(queries.dtype());
  a.scale = settings_.scale;
  a.causal = settings_.causal;
  if (settings_.decay.has_value()) a.decay = kernels::Decay::of(*settings_.decay);
  copy_strides(queries, 3, a.query_strides);
  copy_strides(keys, 3, a.key_strides);
  std::vector<mx::array> held{outputs[0], queries, keys};
  held.insert(held.end(), inputs.begin() + 2, inputs.end());
  if (settings_.has_mask) {
    const mx::array& mask = inputs[starts ? 3 : 2];
    a.mask_type = mask_type(mask.dtype());
    a.mask_threshold = mask_threshold(mask.dtype());
    copy_strides(mask, 4, a.mask_strides);
  }
  if (settings_.has_sinks) {
    a.sink_stride = inputs[inputs.size() - (settings_.has_row_bias ? 2 : 1)].strides(0);
  }
  if (settings_.has_row_bias) {
    held.back() = with_unit_last_stride(inputs.back(), encoder);
    copy_strides(held.back(), 2, a.row_bias_strides);
  }

  // The stream keeps the buffers of inputs, outputs and temporaries until its tasks are done, so
  // the task holds none.
  for (mx::array& array : held) array = mx::array::unsafe_weak_copy(array);
  encoder.dispatch([call, held = std::move(held), settings = settings_, in_place,
                    target = kernels::simd_target()]() mutable {
    auto next = held.begin();
    mx::array& result = *next++;
    call.result = result.data<float>();
    call.attention.queries = (next++)->data<void>();
    call.attention.keys = (next++)->data<void>();
    if (settings.has_importance) {
      if (!in_place) copy_elements(*next, call.result);
      ++next;
    } else if (!call.mass) {
      std::fill_n(call.result, result.size(), std::numeric_limits<float>::quiet_NaN());
    }
    if (settings.has_mask) call.attention.mask = (next++)->data<void>();
    if (settings.has_sinks) call.attention.sinks = (next++)->data<float>();
    if (settings.has_row_bias) call.attention.row_bias = (next++)->data<float>();
    kernels::prefill_scores(call, target);
  });
}

}  // namespace

mx::array prefill_scores(const mx::array& queries, const mx::array& keys, float scale, bool causal,
                         const std::optional<mx::array>& mask,
                         const std::optional<mx::array>& sinks, std::optional<double> decay,
                         const std::optional<mx::array>& importance,
                         const std::optional<mx::array>& row_bias, mx::StreamOrDevice s) {
  Arguments given(kPrefillScores);
  given.array(found(queries));
  given.array(found(keys));
  if (causal && mask.has_value()) {
    fail(kPrefillScores, "found a mask array and \"causal\", expected one of them.");
  }
  given.array(found(mask));
  given.array(found(sinks));
  mx::Shape bias;  // it may have room for more rows
  given.array(row_bias.has_value() ? found_rows(*row_bias, 0, given["N"], bias) : Found{});
  given.array(found(importance));
  given.number("scale", scale);
  if (decay.has_value()) {
    given.number("decay", *decay);
  } else if (importance.has_value()) {
    fail(kPrefillScores, "importance is given for the mass, expected it for the average.");
  }
  const mx::Stream stream = cpu_stream(kPrefillScores, s);
  const PrefillSettings settings{scale,
                                 causal,
                                 decay,
                                 importance.has_value(),
                                 mask.has_value(),
                                 sinks.has_value(),
                                 row_bias.has_value()};
  std::vector<mx::array> inputs{queries, keys};
  if (importance.has_value()) inputs.push_back(*importance);
  if (mask.has_value()) {
    const mx::Shape pairs{queries.shape(0), queries.shape(1), queries.shape(2), keys.shape(2)};
    inputs.push_back(mx::broadcast_to(*mask, pairs, stream));
  }
  if (sinks.has_value()) inputs.push_back(mx::astype(*sinks, mx::float32, stream));
  if (row_bias.has_value()) inputs.push_back(*row_bias);
  return mx::array({keys.shape(0), keys.shape(1), keys.shape(2)}, mx::float32,
                   std::make_shared<PrefillScores>(stream, settings), std::move(inputs));
}

}  // namespace mlx_h2o
