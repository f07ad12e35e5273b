// The attention operation: checks, the MLX primitive, and the hand-over to the kernel.
#include "encoder.h"

#include <memory>
#include <utility>

#include <mlx/ops.h>

#include "attention_checks.h"
#include "attention_kernel.h"
#include "checks.h"
#include "cpu_primitive.h"
#include "donation.h"
#include "element_type.h"
#include "mlx_h2o/ops.h"
#include "strided_copy.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kWithScores = "scaled_dot_product_attention_with_scores";
constexpr const char* kQuantized = "scaled_dot_product_attention_quantized_with_scores";
constexpr const char* kWithProbes = "scaled_dot_product_attention_with_probes";
constexpr const char* kAndAccumulate = "attention_and_accumulate";
constexpr const char* kAttention = "scaled_dot_product_attention";

struct Settings {
  float scale, sparse_threshold;
  int bits, value_bits, group_size;  // bits are 0 where the rows are not packed
  bool causal, has_mask, has_sinks, has_probes, return_scores, return_lse, return_skipped;
  std::optional<double> decay;  // of the importance, where it is given
  bool names_worst;
  int sink_size;
  std::optional<int> recent_start;

  bool operator==(const Settings&) const = default;
};

/// Inputs: queries, the arrays of keys and of values, then the positions [B, Hkv, N], the
/// importance [B, Hkv, N], the probes [B, Hkv, E, D], the mask [B, Hq, Lq, N] and the float32 sinks
/// where there are any. Outputs: out, then scores, lse, the share skipped, the scores of the
/// probes, the new importance and the worst row where they are wanted; the importance in the buffer
/// of its input where nothing else holds that.
class Attention : public CpuPrimitive {
 public:
  Attention(mx::Stream stream, const char* operation, Settings settings)
      : CpuPrimitive(stream, operation), settings_(settings) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override {
    return settings_.decay.has_value() ? "AttentionAndAccumulate"
           : settings_.has_probes      ? "AttentionWithProbes"
           : settings_.bits != 0       ? "QuantizedAttention"
           : settings_.return_scores   ? "AttentionWithScores"
                                       : "Attention";
  }

  bool is_equivalent(const Primitive& other) const override {
    return settings_ == static_cast<const Attention&>(other).settings_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const mx::Shape& q = inputs[0].shape();
    const mx::Shape& k = inputs[1].shape();
    const mx::array& values = inputs[1 + arrays_of_rows()];
    const int words = values.shape(3);
    const int width = settings_.bits == 0 ? words : words * 32 / settings_.value_bits;
    std::vector<mx::Shape> shapes{{q[0], q[1], q[2], width}};
    if (settings_.return_scores) shapes.push_back({q[0], q[1], q[2], k[2]});
    if (settings_.return_lse) shapes.push_back({q[0], q[1], q[2]});
    if (settings_.return_skipped) shapes.push_back({q[0], q[1], q[2]});
    if (settings_.has_probes) {
      const mx::array& probes = inputs[behind_importance()];
      shapes.push_back({k[0], k[1], probes.shape(2), k[2]});
    }
    if (settings_.decay.has_value()) shapes.push_back(inputs[importance_at()].shape());
    if (settings_.names_worst) shapes.push_back({k[0], k[1]});
    return shapes;
  }

 private:
  size_t arrays_of_rows() const { return settings_.bits == 0 ? 1 : 3; }
  size_t behind_rows() const { return 1 + 2 * arrays_of_rows(); }
  size_t importance_at() const { return behind_rows() + (settings_.names_worst ? 1 : 0); }
  size_t behind_importance() const {
    return importance_at() + (settings_.decay.has_value() ? 1 : 0);
  }

  Settings settings_;
};

void copy_strides(const mx::array& from, int axes, int64_t* to) {
  for (int axis = 0; axis < axes; ++axis) to[axis] = from.strides(axis);
}

// Everything of one side but the addresses.
kernels::Packing packing_of(const mx::array* rows, int bits, int group_size) {
  kernels::Packing packing;
  packing.bits = bits;
  packing.group_size = group_size;
  packing.type = element_type(rows[1].dtype());
  copy_strides(rows[1], 3, packing.scale_strides);
  copy_strides(rows[2], 3, packing.bias_strides);
  return packing;
}

void Attention::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  release_sibling_inputs(inputs, outputs);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  const bool accumulates = settings_.decay.has_value();
  const size_t last = outputs.size() - (settings_.names_worst ? 2 : 1);  // the importance, if any
  const bool in_place = accumulates && take_over(inputs[importance_at()], outputs[last]);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (accumulates && i == last) continue;
    outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
  }
  std::vector<mx::array> held;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_rows_or_positions = i < importance_at();
    const bool is_probes = settings_.has_probes && i == behind_importance();
    const bool has_unit_stride = is_rows_or_positions || is_probes;
    held.push_back(has_unit_stride ? with_unit_last_stride(inputs[i], encoder) : inputs[i]);
  }
  const mx::array& queries = held[0];
  const mx::array* keys = &held[1];
  const mx::array* values = &held[1 + arrays_of_rows()];

  kernels::AttentionArguments a{};
  a.batch = queries.shape(0);
  a.query_heads = queries.shape(1);
  a.kv_heads = keys->shape(1);
  a.query_count = queries.shape(2);
  a.key_count = keys->shape(2);
  a.width = queries.shape(3);
  a.value_width = outputs[0].shape(3);
  a.type = element_type(queries.dtype());
  a.scale = settings_.scale;
  a.causal = settings_.causal;
  a.sparse_threshold = settings_.sparse_threshold;
  a.return_scores = settings_.return_scores;
  a.accumulate = accumulates;
  if (accumulates) a.decay = kernels::Decay::of(*settings_.decay);
  copy_strides(queries, 3, a.query_strides);
  copy_strides(*keys, 3, a.key_strides);
  copy_strides(*values, 3, a.value_strides);
  if (settings_.bits != 0) {
    a.key_packing = packing_of(keys, settings_.bits, settings_.group_size);
    a.value_packing = packing_of(values, settings_.value_bits, settings_.group_size);
  }
  if (settings_.names_worst) {
    copy_strides(held[behind_rows()], 2, a.position_strides);
    a.zones = kernels::Zones::of(settings_.sink_size, settings_.recent_start);
  }
  size_t next_input = behind_importance();
  if (settings_.has_probes) {
    const mx::array& probes = held[next_input++];
    a.probe_count = probes.shape(2);
    copy_strides(probes, 3, a.probe_strides);
  }
  if (settings_.has_mask) {
    const mx::array& mask = held[next_input++];
    a.mask_type = mask_type(mask.dtype());
    a.mask_threshold = mask_threshold(mask.dtype());
    copy_strides(mask, 4, a.mask_strides);
  }
  if (settings_.has_sinks) a.sink_stride = held[next_input].strides(0);
  held.insert(held.end(), outputs.begin(), outputs.end());
  mx::array workspace({static_cast<int>(kernels::attention_workspace_size(a))}, mx::float32,
                      nullptr, {});
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
    if (settings.bits != 0) {
      a.key_packing.scales = (next++)->data<void>();
      a.key_packing.biases = (next++)->data<void>();
    }
    a.values = (next++)->data<void>();
    if (settings.bits != 0) {
      a.value_packing.scales = (next++)->data<void>();
      a.value_packing.biases = (next++)->data<void>();
    }
    if (settings.names_worst) a.positions = (next++)->data<int32_t>();
    auto importance = next;
    if (a.accumulate) ++next;
    if (settings.has_probes) a.probes = (next++)->data<void>();
    if (settings.has_mask) a.mask = (next++)->data<void>();
    if (settings.has_sinks) a.sinks = (next++)->data<float>();
    a.out = (next++)->data<void>();
    if (settings.return_scores) a.scores = (next++)->data<float>();
    if (settings.return_lse) a.lse = (next++)->data<float>();
    if (settings.return_skipped) a.skipped = (next++)->data<float>();
    if (settings.has_probes) a.probe_scores = (next++)->data<float>();
    if (a.accumulate) {
      a.importance = (next++)->data<float>();
      if (!in_place) copy_elements(*importance, a.importance);
    }
    if (settings.names_worst) a.worst = (next++)->data<uint32_t>();
    kernels::attention(a, target, next->data<float>());
  });
}

std::vector<mx::array> attend(const char* operation, const mx::array& queries, const Rows& keys,
                              const Rows& values, const AttentionOptions& options,
                              mx::StreamOrDevice s) {
  check_attention(operation, queries, keys, values, options);
  const mx::Stream stream = cpu_stream(operation, s);
  kernels::simd_target();  // refuses a wrong MLX_H2O_SIMD here, not inside the stream

  const bool packed = keys.size() == 3;
  Settings settings{};
  settings.scale = options.scale;
  settings.sparse_threshold = options.sparse_threshold;
  settings.bits = packed ? options.bits : 0;
  settings.value_bits = packed ? options.value_bits : 0;
  settings.group_size = packed ? options.group_size : 0;
  settings.causal = options.causal;
  settings.has_mask = options.mask.has_value();
  settings.has_sinks = options.sinks.has_value();
  settings.has_probes = options.probes.has_value();
  settings.return_scores = options.return_scores;
  settings.return_lse = options.return_lse;
  settings.return_skipped = options.return_skipped;
  if (options.importance.has_value()) settings.decay = options.decay;
  settings.names_worst = options.positions.has_value();
  settings.sink_size = options.sink_size;
  settings.recent_start = options.recent_start;

  std::vector<mx::array> inputs{queries};
  inputs.insert(inputs.end(), keys.begin(), keys.end());
  inputs.insert(inputs.end(), values.begin(), values.end());
  // The importance comes last of what the step before wrote: of the outputs of one primitive MLX
  // evaluates the last that is asked for, and until its task is done holds the others' buffers,
  // which then could not be taken over.
  if (options.positions.has_value()) inputs.push_back(*options.positions);
  if (options.importance.has_value()) inputs.push_back(*options.importance);
  if (options.probes.has_value()) inputs.push_back(*options.probes);
  if (options.mask.has_value()) {
    const mx::Shape pairs{queries.shape(0), queries.shape(1), queries.shape(2), keys[0].shape(2)};
    inputs.push_back(mx::broadcast_to(*options.mask, pairs, stream));
  }
  if (options.sinks.has_value()) {
    inputs.push_back(mx::astype(*options.sinks, mx::float32, stream));
  }
  auto primitive = std::make_shared<Attention>(stream, operation, settings);
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  dtypes[0] = queries.dtype();
  if (settings.names_worst) dtypes.back() = mx::uint32;
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
}

AttentionOptions basic_options(float scale, bool causal, const std::optional<mx::array>& mask,
                               const std::optional<mx::array>& sinks) {
  AttentionOptions options;
  options.scale = scale;
  options.causal = causal;
  options.mask = mask;
  options.sinks = sinks;
  return options;
}

}  // namespace

std::vector<mx::array> attention(const mx::array& queries, const std::vector<mx::array>& keys,
                                 const std::vector<mx::array>& values,
                                 const AttentionOptions& options, mx::StreamOrDevice s) {
  const char* operation = options.importance.has_value() ? kAndAccumulate
                          : options.probes.has_value()   ? kWithProbes
                          : keys.size() == 3             ? kQuantized
                                                         : kWithScores;
  return attend(operation, queries, keys, values, options, s);
}

std::vector<mx::array> scaled_dot_product_attention_with_scores(
    const mx::array& queries, const mx::array& keys, const mx::array& values, float scale,
    bool causal, const std::optional<mx::array>& mask, const std::optional<mx::array>& sinks,
    bool return_lse, mx::StreamOrDevice s) {
  AttentionOptions options = basic_options(scale, causal, mask, sinks);
  options.return_scores = true;
  options.return_lse = return_lse;
  return attend(kWithScores, queries, {keys}, {values}, options, s);
}

std::vector<mx::array> attention_and_accumulate(const mx::array& queries, const mx::array& keys,
                                                const mx::array& values,
                                                const mx::array& importance, float scale,
                                                double decay, bool causal,
                                                const std::optional<mx::array>& mask,
                                                const std::optional<mx::array>& sinks,
                                                mx::StreamOrDevice s) {
  AttentionOptions options = basic_options(scale, causal, mask, sinks);
  options.importance = importance;
  options.decay = decay;
  return attend(kAndAccumulate, queries, {keys}, {values}, options, s);
}

mx::array scaled_dot_product_attention(const mx::array& queries, const mx::array& keys,
                                       const mx::array& values, float scale, bool causal,
                                       const std::optional<mx::array>& mask,
                                       const std::optional<mx::array>& sinks,
                                       mx::StreamOrDevice s) {
  const AttentionOptions options = basic_options(scale, causal, mask, sinks);
  return attend(kAttention, queries, {keys}, {values}, options, s)[0];
}

}  // namespace mlx_h2o
