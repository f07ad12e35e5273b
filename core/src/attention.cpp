// The attention operation: checks, the MLX primitive, and the hand-over to the kernel.
#include "encoder.h"

#include <cmath>
#include <memory>
#include <utility>

#include <mlx/ops.h>

#include "accumulation_checks.h"
#include "attention_kernel.h"
#include "cpu_primitive.h"
#include "donation.h"
#include "element_type.h"
#include "mlx_h2o/ops.h"
#include "strided_copy.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kWithScores = "scaled_dot_product_attention_with_scores";
constexpr const char* kAndAccumulate = "attention_and_accumulate";
constexpr const char* kAttention = "scaled_dot_product_attention";

kernels::MaskType mask_type(mx::Dtype dtype) {
  if (dtype == mx::bool_) return kernels::MaskType::boolean;
  if (dtype == mx::float16) return kernels::MaskType::float16;
  if (dtype == mx::bfloat16) return kernels::MaskType::bfloat16;
  return kernels::MaskType::float32;
}

// Half of the dtype's lowest finite value: models pass that value as well as -inf.
float mask_threshold(mx::Dtype dtype) {
  return dtype == mx::bool_ ? 0.0f : static_cast<float>(mx::finfo(dtype).min / 2);
}

struct Settings {
  float scale;
  bool causal, has_mask, has_sinks, return_scores, return_lse;
  std::optional<double> decay;  // of the importance, where it is given
};

bool operator==(const Settings& one, const Settings& other) {
  return one.scale == other.scale && one.causal == other.causal && one.has_mask == other.has_mask &&
         one.has_sinks == other.has_sinks && one.return_scores == other.return_scores &&
         one.return_lse == other.return_lse && one.decay == other.decay;
}

/// Inputs: queries, keys, values, then the importance [B, Hkv, N], the mask [B, Hq, Lq, N] and the
/// float32 sinks where there are any. Outputs: out, then scores, lse and the new importance where
/// they are wanted; the importance in the buffer of its input where nothing else holds that.
class Attention : public CpuPrimitive {
 public:
  Attention(mx::Stream stream, const char* operation, Settings settings)
      : CpuPrimitive(stream, operation), settings_(settings) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override {
    return settings_.decay.has_value() ? "AttentionAndAccumulate"
           : settings_.return_scores   ? "AttentionWithScores"
                                       : "Attention";
  }

  bool is_equivalent(const Primitive& other) const override {
    return settings_ == static_cast<const Attention&>(other).settings_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const mx::Shape& q = inputs[0].shape();
    std::vector<mx::Shape> shapes{{q[0], q[1], q[2], inputs[2].shape(3)}};
    if (settings_.return_scores) shapes.push_back({q[0], q[1], q[2], inputs[1].shape(2)});
    if (settings_.return_lse) shapes.push_back({q[0], q[1], q[2]});
    if (settings_.decay.has_value()) shapes.push_back(inputs[3].shape());
    return shapes;
  }

 private:
  Settings settings_;
};

void copy_strides(const mx::array& from, int axes, int64_t* to) {
  for (int axis = 0; axis < axes; ++axis) to[axis] = from.strides(axis);
}

void Attention::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  release_sibling_inputs(inputs, outputs);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  const bool accumulates = settings_.decay.has_value();
  const bool in_place = accumulates && take_over(inputs[3], outputs.back());
  for (size_t i = 0; i < outputs.size() - (accumulates ? 1 : 0); ++i) {
    outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
  }
  const mx::array queries = with_unit_last_stride(inputs[0], encoder);
  const mx::array keys = with_unit_last_stride(inputs[1], encoder);
  const mx::array values = with_unit_last_stride(inputs[2], encoder);

  kernels::AttentionArguments a{};
  a.batch = queries.shape(0);
  a.query_heads = queries.shape(1);
  a.kv_heads = keys.shape(1);
  a.query_count = queries.shape(2);
  a.key_count = keys.shape(2);
  a.width = queries.shape(3);
  a.value_width = values.shape(3);
  a.type = element_type(queries.dtype());
  a.scale = settings_.scale;
  a.causal = settings_.causal;
  a.return_scores = settings_.return_scores;
  a.accumulate = accumulates;
  if (accumulates) a.decay = kernels::Decay::of(*settings_.decay);
  copy_strides(queries, 3, a.query_strides);
  copy_strides(keys, 3, a.key_strides);
  copy_strides(values, 3, a.value_strides);
  std::vector<mx::array> held{queries, keys, values};
  if (accumulates) held.push_back(inputs[3]);
  if (settings_.has_mask) {
    const mx::array& mask = inputs[accumulates ? 4 : 3];
    a.mask_type = mask_type(mask.dtype());
    a.mask_threshold = mask_threshold(mask.dtype());
    copy_strides(mask, 4, a.mask_strides);
    held.push_back(mask);
  }
  if (settings_.has_sinks) {
    a.sink_stride = inputs.back().strides(0);
    held.push_back(inputs.back());
  }
  held.insert(held.end(), outputs.begin(), outputs.end());
  const auto floats = static_cast<int>(kernels::attention_workspace_size(a));
  mx::array workspace({floats}, mx::float32, nullptr, {});
  workspace.set_data(mx::allocator::malloc(workspace.nbytes()));
  encoder.add_temporary(workspace);
  held.push_back(std::move(workspace));

  // The stream keeps the buffers of inputs, outputs and temporaries until its tasks are done, so
  // the task holds none; memory is asked for its address only then, when the inputs are there.
  for (mx::array& array : held) array = mx::array::unsafe_weak_copy(array);
  encoder.dispatch([a, held = std::move(held), settings = settings_, in_place,
                    target = kernels::simd_target()]() mutable {
    auto next = held.begin();
    a.queries = (next++)->data<void>();
    a.keys = (next++)->data<void>();
    a.values = (next++)->data<void>();
    auto importance = next;
    if (a.accumulate) ++next;
    if (settings.has_mask) a.mask = (next++)->data<void>();
    if (settings.has_sinks) a.sinks = (next++)->data<float>();
    a.out = (next++)->data<void>();
    if (settings.return_scores) a.scores = (next++)->data<float>();
    if (settings.return_lse) a.lse = (next++)->data<float>();
    if (a.accumulate) {
      a.importance = (next++)->data<float>();
      if (!in_place) copy_elements(*importance, a.importance);
    }
    kernels::attention(a, target, next->data<float>());
  });
}

void check_shapes(const char* operation, const mx::array& queries, const mx::array& keys,
                  const mx::array& values) {
  check_dimensions(operation, "queries", queries, 4, "[B, Hq, Lq, D]");
  check_dimensions(operation, "keys", keys, 4, "[B, Hkv, N, D]");
  check_dimensions(operation, "values", values, 4, "[B, Hkv, N, Dv]");
  check_not_empty(operation, "queries", queries, "[B, Hq, Lq, D]");
  check_not_empty(operation, "keys", keys, "[B, Hkv, N, D]");
  check_not_empty(operation, "values", values, "[B, Hkv, N, Dv]");
  const struct {
    const char* what;
    int one, other;
  } same[] = {
      {"queries and keys have batch sizes ", queries.shape(0), keys.shape(0)},
      {"keys and values have batch sizes ", keys.shape(0), values.shape(0)},
      {"queries and keys have head sizes ", queries.shape(3), keys.shape(3)},
      {"keys and values have head counts ", keys.shape(1), values.shape(1)},
      {"keys and values have lengths ", keys.shape(2), values.shape(2)},
  };
  for (const auto& [what, one, other] : same) {
    if (one != other) fail(operation, what, one, " and ", other, ", expected the same.");
  }
  if (queries.shape(1) % keys.shape(1) != 0) {
    fail(operation, "queries have ", queries.shape(1), " heads, expected a multiple of the ",
         keys.shape(1), " heads of the keys.");
  }
}

void check_dtypes(const char* operation, const mx::array& queries, const mx::array& keys,
                  const mx::array& values) {
  const std::pair<const char*, mx::Dtype> all[] = {
      {"queries", queries.dtype()}, {"keys", keys.dtype()}, {"values", values.dtype()}};
  for (const auto& [name, dtype] : all) {
    if (is_float(dtype)) continue;
    fail(operation, name, " are ", to_text(dtype), ", expected float32, float16 or bfloat16.");
  }
  if (queries.dtype() != keys.dtype() || queries.dtype() != values.dtype()) {
    fail(operation, "queries, keys and values are ", to_text(queries.dtype()), ", ",
         to_text(keys.dtype()), ", ", to_text(values.dtype()),
         ", expected the same dtype of all three.");
  }
}

void check_mask(const char* operation, const mx::array& mask, const mx::Shape& pairs) {
  if (mask.dtype() != mx::bool_ && !is_float(mask.dtype())) {
    fail(operation, "mask is ", to_text(mask.dtype()),
         ", expected bool, or float32, float16 or bfloat16 to add.");
  }
  bool broadcasts = mask.ndim() <= pairs.size();
  for (int axis = 1; broadcasts && axis <= static_cast<int>(mask.ndim()); ++axis) {
    const int found = mask.shape(-axis);
    broadcasts = found == 1 || found == pairs[pairs.size() - static_cast<size_t>(axis)];
  }
  if (!broadcasts) {
    fail(operation, "mask has shape ", to_text(mask.shape()),
         ", expected one that broadcasts to [B, Hq, Lq, N] = ", to_text(pairs), '.');
  }
}

void check_sinks(const char* operation, const mx::array& sinks, int heads) {
  if (!is_float(sinks.dtype())) {
    fail(operation, "sinks are ", to_text(sinks.dtype()),
         ", expected float32, float16 or bfloat16.");
  }
  if (sinks.shape() != mx::Shape{heads}) {
    fail(operation, "sinks have shape ", to_text(sinks.shape()), ", expected [Hq] = (", heads,
         ",).");
  }
}

/// The arguments of one call, as they come.
struct Call {
  const mx::array &queries, &keys, &values;
  const std::optional<mx::array>&mask, &sinks;
};

std::vector<mx::array> attend(const char* operation, const Call& call, const mx::array* importance,
                              Settings settings, mx::StreamOrDevice s) {
  const auto& [queries, keys, values, mask, sinks] = call;
  check_shapes(operation, queries, keys, values);
  check_dtypes(operation, queries, keys, values);
  if (!std::isfinite(settings.scale)) {
    fail(operation, "scale is ", settings.scale, ", expected a finite number.");
  }
  if (settings.causal && mask.has_value()) {
    fail(operation, "found a mask array and \"causal\", expected one of them.");
  }
  const mx::Shape pairs{queries.shape(0), queries.shape(1), queries.shape(2), keys.shape(2)};
  if (mask.has_value()) check_mask(operation, *mask, pairs);
  if (sinks.has_value()) check_sinks(operation, *sinks, queries.shape(1));
  if (importance != nullptr) {
    check_importance(operation, *importance, pairs[0], pairs[3], keys.shape(1));
    if (importance->shape(1) != keys.shape(1)) {
      fail(operation, "importance has ", importance->shape(1), " heads, expected ", keys.shape(1),
           " as the keys.");
    }
    check_query_count(operation, pairs[2]);
    check_decay(operation, *settings.decay);
  }
  const mx::Stream stream = cpu_stream(operation, s);
  kernels::simd_target();  // refuses a wrong MLX_H2O_SIMD here, not inside the stream

  settings.has_mask = mask.has_value();
  settings.has_sinks = sinks.has_value();
  std::vector<mx::array> inputs{queries, keys, values};
  if (importance != nullptr) inputs.push_back(*importance);
  if (mask.has_value()) inputs.push_back(mx::broadcast_to(*mask, pairs, stream));
  if (sinks.has_value()) inputs.push_back(mx::astype(*sinks, mx::float32, stream));
  auto primitive = std::make_shared<Attention>(stream, operation, settings);
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  dtypes[0] = queries.dtype();
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
}

}  // namespace

std::vector<mx::array> scaled_dot_product_attention_with_scores(
    const mx::array& queries, const mx::array& keys, const mx::array& values, float scale,
    bool causal, const std::optional<mx::array>& mask, const std::optional<mx::array>& sinks,
    bool return_lse, mx::StreamOrDevice s) {
  const Settings settings{scale, causal, false, false, true, return_lse, std::nullopt};
  return attend(kWithScores, {queries, keys, values, mask, sinks}, nullptr, settings, s);
}

std::vector<mx::array> attention_and_accumulate(const mx::array& queries, const mx::array& keys,
                                                const mx::array& values,
                                                const mx::array& importance, float scale,
                                                double decay, bool causal,
                                                const std::optional<mx::array>& mask,
                                                const std::optional<mx::array>& sinks,
                                                mx::StreamOrDevice s) {
  const Settings settings{scale, causal, false, false, false, false, decay};
  return attend(kAndAccumulate, {queries, keys, values, mask, sinks}, &importance, settings, s);
}

mx::array scaled_dot_product_attention(const mx::array& queries, const mx::array& keys,
                                       const mx::array& values, float scale, bool causal,
                                       const std::optional<mx::array>& mask,
                                       const std::optional<mx::array>& sinks,
                                       mx::StreamOrDevice s) {
  const Settings settings{scale, causal, false, false, false, false, std::nullopt};
  return attend(kAttention, {queries, keys, values, mask, sinks}, nullptr, settings, s)[0];
}

}  // namespace mlx_h2o
