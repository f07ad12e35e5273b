// One new row in a cache of mixed precision: the MLX primitive and its task.
#include "encoder.h"

#include <memory>
#include <utility>

#include "cpu_primitive.h"
#include "donation.h"
#include "element_type.h"
#include "mlx_h2o/ops.h"
#include "strided_copy.h"
#include "tier_checks.h"
#include "tier_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr size_t kPerTier = 6;  // words, scales and biases of keys, and of values

struct Settings {
  int position;
  int sink_size;
  std::optional<int> recent_start;
  bool has_ranks, has_statistics;
  std::vector<int> bits, value_bits;  // of each tier
  int group_size;

  bool operator==(const Settings& that) const = default;

  // The places of the inputs. All before the new rows are outputs too.
  size_t keys() const { return kPerTier * bits.size(); }
  size_t values() const { return keys() + 1; }
  size_t importance() const { return keys() + 2; }
  size_t positions() const { return keys() + 3; }
  size_t key_sum() const { return keys() + 4; }
  size_t new_keys() const { return keys() + (has_statistics ? 6 : 4); }
  size_t new_values() const { return new_keys() + 1; }
  size_t ranks() const { return new_keys() + 2; }
};

/// Inputs: the arrays of the tiers, the newest keys and values, importance, positions, key_sum and
/// inverse_norms where they are kept, new keys and values, ranks where they are given. Outputs: all
/// that come before the new keys.
class ReplaceInTiers : public CpuPrimitive {
 public:
  ReplaceInTiers(mx::Stream stream, Settings settings)
      : CpuPrimitive(stream, kReplaceInTiers), settings_(std::move(settings)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "ReplaceInTiers"; }

  bool is_equivalent(const Primitive& other) const override {
    return settings_ == static_cast<const ReplaceInTiers&>(other).settings_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < settings_.new_keys(); ++i) shapes.push_back(inputs[i].shape());
    return shapes;
  }

 private:
  Settings settings_;
};

/// What one evaluation needs; its arrays own nothing.
struct Task {
  Settings settings;
  std::vector<mx::array> inputs, outputs;
  std::vector<bool> in_place;
  kernels::SimdTarget target;

  void operator()() {
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!in_place[i]) copy_elements(inputs[i], outputs[i].data<void>());
    }
    const mx::array& new_keys = inputs[settings.new_keys()];
    const mx::array& new_values = inputs[settings.new_values()];
    kernels::TierArguments a{};
    a.batch = new_keys.shape(0);
    a.heads = new_keys.shape(1);
    a.heavy = tier(0);
    if (settings.bits.size() > 1) a.light = tier(1);
    a.newest = {dense(settings.keys()), dense(settings.values()),
                outputs[settings.keys()].shape(2)};
    a.new_keys = new_keys.data<void>();
    a.new_values = new_values.data<void>();
    for (int axis = 0; axis < 2; ++axis) {
      a.new_key_strides[axis] = new_keys.strides(axis);
      a.new_value_strides[axis] = new_values.strides(axis);
    }
    a.position = settings.position;
    a.zones = kernels::Zones::of(settings.sink_size, settings.recent_start);
    if (settings.has_ranks) {
      const mx::array& ranks = inputs[settings.ranks()];
      a.ranks = ranks.data<float>();
      for (int axis = 0; axis < 2; ++axis) a.rank_strides[axis] = ranks.strides(axis);
    }
    a.importance = outputs[settings.importance()].data<float>();
    a.positions = outputs[settings.positions()].data<int32_t>();
    if (settings.has_statistics) {
      a.key_sum = outputs[settings.key_sum()].data<float>();
      a.inverse_norms = outputs[settings.key_sum() + 1].data<float>();
    }
    kernels::replace_in_tiers(a, target);
  }

  kernels::StoredRows dense(size_t place) {
    mx::array& rows = outputs[place];
    return {element_type(rows.dtype()), rows.shape(3), rows.data<void>()};
  }

  kernels::Tier tier(size_t index) {
    const size_t first = kPerTier * index;
    return {packed(first, settings.keys(), settings.bits[index]),
            packed(first + 3, settings.values(), settings.value_bits[index]),
            outputs[first].shape(2)};
  }

  kernels::StoredRows packed(size_t first, size_t like, int bits) {
    const mx::array& newest = outputs[like];
    kernels::StoredRows rows{element_type(newest.dtype()), newest.shape(3)};
    rows.packed = {outputs[first].data<uint32_t>(), outputs[first + 1].data<void>(),
                   outputs[first + 2].data<void>(), bits, settings.group_size};
    return rows;
  }
};

void ReplaceInTiers::eval_cpu(const std::vector<mx::array>& inputs,
                              std::vector<mx::array>& outputs) {
  release_sibling_inputs(inputs, outputs);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  Task task{settings_, {}, {}, {}, kernels::simd_target()};
  for (size_t i = 0; i < outputs.size(); ++i) {
    task.in_place.push_back(take_over(inputs[i], outputs[i]));
    task.outputs.push_back(mx::array::unsafe_weak_copy(outputs[i]));
  }
  // The stream keeps the buffers of inputs, outputs and temporaries until its tasks are done, so
  // the task holds none.
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_read_by_rows = i >= settings_.new_keys();
    task.inputs.push_back(mx::array::unsafe_weak_copy(
        is_read_by_rows ? with_unit_last_stride(inputs[i], encoder) : inputs[i]));
  }
  encoder.dispatch(std::move(task));
}

}  // namespace

std::vector<mx::array> replace_in_tiers(const std::vector<mx::array>& tiers, const mx::array& keys,
                                        const mx::array& values, const mx::array& importance,
                                        const mx::array& positions, const mx::array& new_keys,
                                        const mx::array& new_values, int position,
                                        const TierOptions& options, mx::StreamOrDevice s) {
  check_tiers(tiers, keys, values, importance, positions, new_keys, new_values, position, options);
  const mx::Stream stream = cpu_stream(kReplaceInTiers, s);
  kernels::simd_target();  // refuses a wrong MLX_H2O_SIMD here, not inside the stream

  std::vector<mx::array> inputs(tiers);
  inputs.insert(inputs.end(), {keys, values, importance, positions});
  inputs.insert(inputs.end(), options.statistics.begin(), options.statistics.end());
  std::vector<mx::Dtype> dtypes;
  dtypes.reserve(inputs.size());
  for (const mx::array& input : inputs) dtypes.push_back(input.dtype());
  inputs.insert(inputs.end(), {new_keys, new_values});
  if (options.ranks.has_value()) inputs.push_back(*options.ranks);
  auto primitive = std::make_shared<ReplaceInTiers>(
      stream,
      Settings{position, options.sink_size, options.recent_start, options.ranks.has_value(),
               !options.statistics.empty(), options.bits, options.value_bits, options.group_size});
  return mx::array::make_arrays(primitive->output_shapes(inputs), dtypes, primitive, inputs);
}

}  // namespace mlx_h2o
