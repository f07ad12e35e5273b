// The operation that overwrites the worst row of each head: the MLX primitive and its task.
#include <memory>
#include <utility>

#include <mlx/backend/cpu/encoder.h>

#include "array_memory.h"
#include "cpu_primitive.h"
#include "donation.h"
#include "element_type.h"
#include "key_diversity_kernel.h"
#include "mlx_h2o/ops.h"
#include "replacement_checks.h"
#include "row_kernel.h"
#include "selection_kernel.h"
#include "strided_copy.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

struct ReplacementSettings {
  int sink_size;
  RankedBy ranked_by;
  bool has_recent_start;
  int parts;  // of the keys, and of the values: one array, or words, scales and biases
  int bits, value_bits, group_size;

  bool operator==(const ReplacementSettings& that) const = default;

  // The places of the inputs. All before the new rows are outputs too.
  size_t values() const { return static_cast<size_t>(parts); }
  size_t importance() const { return 2 * static_cast<size_t>(parts); }
  size_t positions() const { return importance() + 1; }
  size_t new_keys() const { return importance() + 2; }
  size_t new_values() const { return new_keys() + 1; }
  size_t position() const { return new_keys() + 2; }
  size_t recent_start() const { return position() + 1; }
  size_t ranks() const { return recent_start() + (has_recent_start ? 1 : 0); }
};

/// Inputs: the one or three arrays of the keys [B, H, N, D], those of the values [B, H, N, Dv],
/// importance float32 [B, H, N], positions int32 [B, H, N]; new keys [B, H, 1, D], new values
/// [B, H, 1, Dv], the position int32 [] or [B]; then, where they are given, recent_start, as the
/// position, and ranks float32 [B, H, N]. Outputs: all that come before the new keys, in the
/// buffers of the inputs where nothing else holds those.
class ReplaceWorst : public CpuPrimitive {
 public:
  ReplaceWorst(mx::Stream stream, ReplacementSettings settings)
      : CpuPrimitive(stream, kReplaceWorst), settings_(settings) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "ReplaceWorst"; }

  bool is_equivalent(const Primitive& other) const override {
    return settings_ == static_cast<const ReplaceWorst&>(other).settings_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < settings_.new_keys(); ++i) shapes.push_back(inputs[i].shape());
    return shapes;
  }

 private:
  ReplacementSettings settings_;
};

/// What one evaluation needs; its arrays own nothing.
struct Task {
  ReplacementSettings settings;
  std::vector<mx::array> inputs, outputs;
  std::vector<bool> in_place;
  mx::array ranks;  // where they are made here
  kernels::SimdTarget target;

  void operator()() {
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!in_place[i]) copy_elements(inputs[i], outputs[i].data<void>());
    }
    const mx::array& new_keys = inputs[settings.new_keys()];
    const mx::array& new_values = inputs[settings.new_values()];
    kernels::RowArguments a{};
    a.batch = new_keys.shape(0);
    a.heads = new_keys.shape(1);
    a.rows = outputs[settings.positions()].shape(2);
    a.keys = stored(0, new_keys, settings.bits);
    a.values = stored(settings.values(), new_values, settings.value_bits);
    a.new_keys = new_keys.data<void>();
    a.new_values = new_values.data<void>();
    for (int axis = 0; axis < 2; ++axis) {
      a.new_key_strides[axis] = new_keys.strides(axis);
      a.new_value_strides[axis] = new_values.strides(axis);
    }
    a.position = inputs[settings.position()].data<int32_t>();
    a.position_stride = stride_of_sequences(inputs[settings.position()]);
    a.importance = outputs[settings.importance()].data<float>();
    a.positions = outputs[settings.positions()].data<int32_t>();
    std::vector<uint32_t> chosen(static_cast<size_t>(a.batch) * static_cast<size_t>(a.heads));
    choose(a, chosen.data());
    a.slots = chosen.data();
    kernels::write_rows(a, target);
  }

  kernels::StoredRows stored(size_t first, const mx::array& new_rows, int bits) {
    kernels::StoredRows rows{element_type(new_rows.dtype()), new_rows.shape(3)};
    if (settings.parts == 1) {
      rows.dense = outputs[first].data<void>();
      return rows;
    }
    rows.packed = {outputs[first].data<uint32_t>(), outputs[first + 1].data<void>(),
                   outputs[first + 2].data<void>(), bits, settings.group_size};
    return rows;
  }

  void choose(const kernels::RowArguments& rows, uint32_t* slots) {
    const mx::array& positions = outputs[settings.positions()];
    kernels::SelectionArguments a{};
    a.batch = rows.batch;
    a.heads = rows.heads;
    a.rows = rows.rows;
    a.sink_size = settings.sink_size;
    if (settings.has_recent_start) {
      const mx::array& starts = inputs[settings.recent_start()];
      a.recent_start = starts.data<int32_t>();
      a.recent_start_stride = stride_of_sequences(starts);
    }
    a.target = target;
    a.positions = rows.positions;
    const mx::array& ranked = make_ranks(rows);
    a.scores = ranked.data<float>();
    for (int axis = 0; axis < 3; ++axis) {
      a.position_strides[axis] = positions.strides(axis);
      a.score_strides[axis] = ranked.strides(axis);
    }
    kernels::evict_indices(a, 1, slots);
  }

  const mx::array& make_ranks(const kernels::RowArguments& rows) {
    switch (settings.ranked_by) {
      case RankedBy::importance:
        return outputs[settings.importance()];
      case RankedBy::array:
        return inputs[settings.ranks()];
      case RankedBy::age: {
        const int64_t of_sequence = int64_t{rows.heads} * rows.rows;
        auto* ages = ranks.data<float>();
        for (int64_t i = 0; i < rows.batch * of_sequence; ++i) {
          // The age, not the position: float32 does not hold every position beyond 2^24.
          const int64_t newest = rows.position[i / of_sequence * rows.position_stride];
          ages[i] = static_cast<float>(rows.positions[i] - newest);
        }
        return ranks;
      }
      case RankedBy::key_diversity: {
        kernels::KeyDiversityArguments a = key_diversity_arguments(outputs[0]);
        a.keys = outputs[0].data<void>();
        a.result = ranks.data<float>();
        kernels::key_diversity(a, target);
        return ranks;
      }
    }
    return outputs[settings.importance()];
  }

  static kernels::KeyDiversityArguments key_diversity_arguments(const mx::array& keys) {
    kernels::KeyDiversityArguments a{};
    a.batch = keys.shape(0);
    a.heads = keys.shape(1);
    a.rows = keys.shape(2);
    a.width = keys.shape(3);
    a.type = element_type(keys.dtype());
    for (int axis = 0; axis < 3; ++axis) a.key_strides[axis] = keys.strides(axis);
    return a;
  }
};

mx::array temporary(mx::Shape shape, mx::cpu::CommandEncoder& encoder) {
  mx::array result(std::move(shape), mx::float32, nullptr, {});
  allocate(result);
  encoder.add_temporary(result);
  return mx::array::unsafe_weak_copy(result);
}

void ReplaceWorst::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  release_sibling_inputs(inputs, outputs);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  Task task{settings_, {}, {}, {}, mx::array(0.0f), kernels::simd_target()};
  for (size_t i = 0; i < outputs.size(); ++i) {
    task.in_place.push_back(take_over(inputs[i], outputs[i]));
    task.outputs.push_back(mx::array::unsafe_weak_copy(outputs[i]));
  }
  // The stream keeps the buffers of inputs, outputs and temporaries until its tasks are done, so
  // the task holds none.
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_row = i == settings_.new_keys() || i == settings_.new_values();
    task.inputs.push_back(mx::array::unsafe_weak_copy(
        is_row ? with_unit_last_stride(inputs[i], encoder) : inputs[i]));
  }
  const bool made_here =
      settings_.ranked_by == RankedBy::key_diversity || settings_.ranked_by == RankedBy::age;
  if (made_here) {
    task.ranks = temporary(outputs[settings_.importance()].shape(), encoder);
  }
  encoder.dispatch(std::move(task));
}

}  // namespace

std::vector<mx::array> replace_worst(const std::vector<mx::array>& keys,
                                     const std::vector<mx::array>& values,
                                     const mx::array& importance, const mx::array& positions,
                                     const mx::array& new_keys, const mx::array& new_values,
                                     const mx::array& position, const ReplacementOptions& options,
                                     mx::StreamOrDevice s) {
  check_replacement(keys, values, importance, positions, new_keys, new_values, position, options);
  const mx::Stream stream = cpu_stream(kReplaceWorst, s);
  kernels::simd_target();  // refuses a wrong MLX_H2O_SIMD here, not inside the stream

  std::vector<mx::array> inputs(keys);
  inputs.insert(inputs.end(), values.begin(), values.end());
  inputs.insert(inputs.end(), {importance, positions});
  std::vector<mx::Dtype> dtypes;
  dtypes.reserve(inputs.size());
  for (const mx::array& input : inputs) dtypes.push_back(input.dtype());
  inputs.insert(inputs.end(), {new_keys, new_values, position});
  if (options.recent_start.has_value()) inputs.push_back(*options.recent_start);
  if (options.ranks.has_value()) inputs.push_back(*options.ranks);
  const ReplacementSettings settings{options.sink_size,
                                     options.ranked_by,
                                     options.recent_start.has_value(),
                                     static_cast<int>(keys.size()),
                                     options.bits,
                                     options.value_bits,
                                     options.group_size};
  auto primitive = std::make_shared<ReplaceWorst>(stream, settings);
  return mx::array::make_arrays(primitive->output_shapes(inputs), dtypes, primitive, inputs);
}

}  // namespace mlx_h2o
