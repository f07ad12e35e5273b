// The attention operation: checks, the MLX primitive, and the hand-over to the kernel.
#include "encoder.h"

#include <cmath>
#include <memory>
#include <utility>

#include <mlx/ops.h>
#include <mlx/primitives.h>

#include "attention_kernel.h"
#include "checks.h"
#include "mlx_h2o/ops.h"
#include "strided_copy.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kOperation = "scaled_dot_product_attention_with_scores";

kernels::ElementType element_type(mx::Dtype dtype) {
  if (dtype == mx::float16) return kernels::ElementType::float16;
  if (dtype == mx::bfloat16) return kernels::ElementType::bfloat16;
  return kernels::ElementType::float32;
}

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

/// Inputs: queries, keys, values, then the mask [B, Hq, Lq, N] and the float32 sinks where there
/// are any. Outputs: out, scores, and lse where it is wanted.
class AttentionWithScores : public mx::Primitive {
 public:
  AttentionWithScores(mx::Stream stream, float scale, bool causal, bool has_mask, bool has_sinks,
                      bool return_lse)
      : Primitive(stream),
        scale_(scale),
        causal_(causal),
        has_mask_(has_mask),
        has_sinks_(has_sinks),
        return_lse_(return_lse) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(
        "[scaled_dot_product_attention_with_scores] the native back end has "
        "no GPU implementation; expected a CPU stream.");
  }

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>&,
                                                           const std::vector<int>&) override {
    throw std::invalid_argument(
        "[scaled_dot_product_attention_with_scores] the native back end cannot be vmapped; use "
        "the batch axis, or the composed back end.");
  }

  const char* name() const override { return "AttentionWithScores"; }

  bool is_equivalent(const Primitive& other) const override {
    const auto& that = static_cast<const AttentionWithScores&>(other);
    return scale_ == that.scale_ && causal_ == that.causal_ && has_mask_ == that.has_mask_ &&
           has_sinks_ == that.has_sinks_ && return_lse_ == that.return_lse_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const mx::Shape& q = inputs[0].shape();
    std::vector<mx::Shape> shapes{{q[0], q[1], q[2], inputs[2].shape(3)},
                                  {q[0], q[1], q[2], inputs[1].shape(2)}};
    if (return_lse_) shapes.push_back({q[0], q[1], q[2]});
    return shapes;
  }

 private:
  float scale_;
  bool causal_, has_mask_, has_sinks_, return_lse_;
};

void copy_strides(const mx::array& from, int axes, int64_t* to) {
  for (int axis = 0; axis < axes; ++axis) to[axis] = from.strides(axis);
}

void AttentionWithScores::eval_cpu(const std::vector<mx::array>& inputs,
                                   std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (mx::array& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));
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
  a.scale = scale_;
  a.causal = causal_;
  copy_strides(queries, 3, a.query_strides);
  copy_strides(keys, 3, a.key_strides);
  copy_strides(values, 3, a.value_strides);
  std::vector<mx::array> held{queries, keys, values};
  if (has_mask_) {
    const mx::array& mask = inputs[3];
    a.mask_type = mask_type(mask.dtype());
    a.mask_threshold = mask_threshold(mask.dtype());
    copy_strides(mask, 4, a.mask_strides);
    held.push_back(mask);
  }
  if (has_sinks_) {
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
  encoder.dispatch([a, held = std::move(held), has_mask = has_mask_, has_sinks = has_sinks_,
                    return_lse = return_lse_, target = kernels::simd_target()]() mutable {
    auto next = held.begin();
    a.queries = (next++)->data<void>();
    a.keys = (next++)->data<void>();
    a.values = (next++)->data<void>();
    if (has_mask) a.mask = (next++)->data<void>();
    if (has_sinks) a.sinks = (next++)->data<float>();
    a.out = (next++)->data<void>();
    a.scores = (next++)->data<float>();
    if (return_lse) a.lse = (next++)->data<float>();
    kernels::attention(a, target, next->data<float>());
  });
}

void check_shapes(const mx::array& queries, const mx::array& keys, const mx::array& values) {
  check_dimensions(kOperation, "queries", queries, 4, "[B, Hq, Lq, D]");
  check_dimensions(kOperation, "keys", keys, 4, "[B, Hkv, N, D]");
  check_dimensions(kOperation, "values", values, 4, "[B, Hkv, N, Dv]");
  check_not_empty(kOperation, "queries", queries, "[B, Hq, Lq, D]");
  check_not_empty(kOperation, "keys", keys, "[B, Hkv, N, D]");
  check_not_empty(kOperation, "values", values, "[B, Hkv, N, Dv]");
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
    if (one != other) fail(kOperation, what, one, " and ", other, ", expected the same.");
  }
  if (queries.shape(1) % keys.shape(1) != 0) {
    fail(kOperation, "queries have ", queries.shape(1), " heads, expected a multiple of the ",
         keys.shape(1), " heads of the keys.");
  }
}

void check_dtypes(const mx::array& queries, const mx::array& keys, const mx::array& values) {
  const std::pair<const char*, mx::Dtype> all[] = {
      {"queries", queries.dtype()}, {"keys", keys.dtype()}, {"values", values.dtype()}};
  for (const auto& [name, dtype] : all) {
    if (is_float(dtype)) continue;
    fail(kOperation, name, " are ", to_text(dtype), ", expected float32, float16 or bfloat16.");
  }
  if (queries.dtype() != keys.dtype() || queries.dtype() != values.dtype()) {
    fail(kOperation, "queries, keys and values are ", to_text(queries.dtype()), ", ",
         to_text(keys.dtype()), ", ", to_text(values.dtype()),
         ", expected the same dtype of all three.");
  }
}

void check_mask(const mx::array& mask, const mx::Shape& pairs) {
  if (mask.dtype() != mx::bool_ && !is_float(mask.dtype())) {
    fail(kOperation, "mask is ", to_text(mask.dtype()),
         ", expected bool, or float32, float16 or bfloat16 to add.");
  }
  bool broadcasts = mask.ndim() <= pairs.size();
  for (int axis = 1; broadcasts && axis <= static_cast<int>(mask.ndim()); ++axis) {
    const int found = mask.shape(-axis);
    broadcasts = found == 1 || found == pairs[pairs.size() - static_cast<size_t>(axis)];
  }
  if (!broadcasts) {
    fail(kOperation, "mask has shape ", to_text(mask.shape()),
         ", expected one that broadcasts to [B, Hq, Lq, N] = ", to_text(pairs), '.');
  }
}

void check_sinks(const mx::array& sinks, int heads) {
  if (!is_float(sinks.dtype())) {
    fail(kOperation, "sinks are ", to_text(sinks.dtype()),
         ", expected float32, float16 or bfloat16.");
  }
  if (sinks.shape() != mx::Shape{heads}) {
    fail(kOperation, "sinks have shape ", to_text(sinks.shape()), ", expected [Hq] = (", heads,
         ",).");
  }
}

}  // namespace

std::vector<mx::array> scaled_dot_product_attention_with_scores(
    const mx::array& queries, const mx::array& keys, const mx::array& values, float scale,
    bool causal, const std::optional<mx::array>& mask, const std::optional<mx::array>& sinks,
    bool return_lse, mx::StreamOrDevice s) {
  check_shapes(queries, keys, values);
  check_dtypes(queries, keys, values);
  if (!std::isfinite(scale)) fail(kOperation, "scale is ", scale, ", expected a finite number.");
  if (causal && mask.has_value()) {
    fail(kOperation, "found a mask array and \"causal\", expected one of them.");
  }
  const mx::Shape pairs{queries.shape(0), queries.shape(1), queries.shape(2), keys.shape(2)};
  if (mask.has_value()) check_mask(*mask, pairs);
  if (sinks.has_value()) check_sinks(*sinks, queries.shape(1));
  const mx::Stream stream = cpu_stream(kOperation, s);
  kernels::simd_target();  // refuses a wrong MLX_H2O_SIMD here, not inside the stream

  std::vector<mx::array> inputs{queries, keys, values};
  if (mask.has_value()) inputs.push_back(mx::broadcast_to(*mask, pairs, stream));
  if (sinks.has_value()) inputs.push_back(mx::astype(*sinks, mx::float32, stream));
  auto primitive = std::make_shared<AttentionWithScores>(stream, scale, causal, mask.has_value(),
                                                         sinks.has_value(), return_lse);
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  dtypes[0] = queries.dtype();
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
}

}  // namespace mlx_h2o
