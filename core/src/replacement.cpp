// The operation that overwrites the worst row of each head: checks, the MLX primitive, and its
// task.
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include <mlx/backend/cpu/encoder.h>

#include "cpu_primitive.h"
#include "donation.h"
#include "element_type.h"
#include "key_diversity_kernel.h"
#include "mlx_h2o/ops.h"
#include "selection_kernel.h"
#include "strided_copy.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kOperation = "replace_worst";

struct Settings {
  int position;
  int sink_size;
  std::optional<int> recent_start;
  RankedBy ranked_by;
};

/// Inputs: keys [B, H, N, D], values [B, H, N, Dv], importance float32 [B, H, N], positions int32
/// [B, H, N], new keys [B, H, 1, D], new values [B, H, 1, Dv], and ranks float32 [B, H, N] where
/// they are given. Outputs: keys, values, importance, positions, in the buffers of the inputs where
/// nothing else holds those.
class ReplaceWorst : public CpuPrimitive {
 public:
  ReplaceWorst(mx::Stream stream, Settings settings)
      : CpuPrimitive(stream, kOperation), settings_(settings) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "ReplaceWorst"; }

  bool is_equivalent(const Primitive& other) const override {
    const Settings& that = static_cast<const ReplaceWorst&>(other).settings_;
    return settings_.position == that.position && settings_.sink_size == that.sink_size &&
           settings_.recent_start == that.recent_start && settings_.ranked_by == that.ranked_by;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape(), inputs[1].shape(), inputs[2].shape(), inputs[3].shape()};
  }

 private:
  Settings settings_;
};

/// Row `slot` of each head of `to`, which is contiguous, becomes the row of `from` [B, H, 1, D].
void write_rows(const mx::array& from, const std::vector<uint32_t>& slots, mx::array& to) {
  const size_t row_bytes = static_cast<size_t>(to.shape(3)) * to.itemsize();
  const int heads = to.shape(1);
  const char* rows = from.data<char>();
  char* result = to.data<char>();
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto batch = static_cast<int64_t>(i) / heads;
    const auto head = static_cast<int64_t>(i) % heads;
    const int64_t offset = batch * from.strides(0) + head * from.strides(1);
    const size_t slot = i * static_cast<size_t>(to.shape(2)) + slots[i];
    std::memcpy(result + slot * row_bytes, rows + offset * static_cast<int64_t>(from.itemsize()),
                row_bytes);
  }
}

/// What one evaluation needs; its arrays own nothing.
struct Task {
  Settings settings;
  std::vector<mx::array> inputs, outputs;
  bool in_place[4];
  mx::array ranks, workspace;  // where the ranks are made here
  kernels::SimdTarget target;

  void operator()() {
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!in_place[i]) copy_elements(inputs[i], outputs[i].data<void>());
    }
    mx::array& keys = outputs[0];
    auto* importance = outputs[2].data<float>();
    auto* positions = outputs[3].data<int32_t>();
    std::vector<uint32_t> slots(static_cast<size_t>(keys.shape(0)) *
                                static_cast<size_t>(keys.shape(1)));
    kernels::SelectionArguments a{};
    a.batch = keys.shape(0);
    a.heads = keys.shape(1);
    a.rows = keys.shape(2);
    a.sink_size = settings.sink_size;
    a.recent_start = settings.recent_start;
    a.positions = positions;
    const mx::array& ranked = make_ranks();
    a.scores = ranked.data<float>();
    for (int axis = 0; axis < 3; ++axis) {
      a.position_strides[axis] = outputs[3].strides(axis);
      a.score_strides[axis] = ranked.strides(axis);
    }
    kernels::evict_indices(a, 1, slots.data());

    write_rows(inputs[4], slots, keys);
    write_rows(inputs[5], slots, outputs[1]);
    for (size_t i = 0; i < slots.size(); ++i) {
      const size_t slot = i * static_cast<size_t>(a.rows) + slots[i];
      importance[slot] = std::numeric_limits<float>::quiet_NaN();
      positions[slot] = settings.position;
    }
  }

  const mx::array& make_ranks() {
    switch (settings.ranked_by) {
      case RankedBy::importance:
        return outputs[2];
      case RankedBy::array:
        return inputs[6];
      case RankedBy::age: {
        const auto* positions = outputs[3].data<int32_t>();
        auto* ages = ranks.data<float>();
        for (size_t i = 0; i < ranks.size(); ++i) {
          // The age, not the position: float32 does not hold every position beyond 2^24.
          ages[i] = static_cast<float>(positions[i] - settings.position);
        }
        return ranks;
      }
      case RankedBy::key_diversity: {
        kernels::KeyDiversityArguments a = key_diversity_arguments(outputs[0]);
        a.keys = outputs[0].data<void>();
        a.result = ranks.data<float>();
        kernels::key_diversity(a, target, workspace.data<float>());
        return ranks;
      }
    }
    return outputs[2];
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
  result.set_data(mx::allocator::malloc(result.nbytes()));
  encoder.add_temporary(result);
  return mx::array::unsafe_weak_copy(result);
}

void ReplaceWorst::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  release_sibling_inputs(inputs, outputs);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  Task task{settings_, {}, {}, {}, mx::array(0.0f), mx::array(0.0f), kernels::simd_target()};
  for (size_t i = 0; i < outputs.size(); ++i) {
    task.in_place[i] = take_over(inputs[i], outputs[i]);
    task.outputs.push_back(mx::array::unsafe_weak_copy(outputs[i]));
  }
  // The stream keeps the buffers of inputs, outputs and temporaries until its tasks are done, so
  // the task holds none.
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_row = i == 4 || i == 5;
    task.inputs.push_back(mx::array::unsafe_weak_copy(
        is_row ? with_unit_last_stride(inputs[i], encoder) : inputs[i]));
  }
  const bool by_keys = settings_.ranked_by == RankedBy::key_diversity;
  if (by_keys || settings_.ranked_by == RankedBy::age) {
    task.ranks = temporary(outputs[2].shape(), encoder);
  }
  if (by_keys) {
    const auto a = Task::key_diversity_arguments(outputs[0]);
    task.workspace =
        temporary({static_cast<int>(kernels::key_diversity_workspace_size(a))}, encoder);
  }
  encoder.dispatch(std::move(task));
}

void check_like(const char* name, const mx::array& found, const mx::array& stored,
                const char* what) {
  check_dimensions(kOperation, name, found, 4, "[B, H, 1, D]");
  mx::Shape expected = stored.shape();
  expected[2] = 1;
  if (found.shape() == expected && found.dtype() == stored.dtype()) return;
  fail(kOperation, name, " are ", to_text(found.dtype()), ' ', to_text(found.shape()),
       ", expected ", to_text(stored.dtype()), ' ', to_text(expected), " as the ", what, '.');
}

void check_per_row(const char* name, const mx::array& found, const mx::Shape& rows,
                   mx::Dtype dtype) {
  if (found.shape() == rows && found.dtype() == dtype) return;
  fail(kOperation, name, " are ", to_text(found.dtype()), ' ', to_text(found.shape()),
       ", expected ", to_text(dtype), " [B, H, N] = ", to_text(rows), '.');
}

}  // namespace

std::vector<mx::array> replace_worst(const mx::array& keys, const mx::array& values,
                                     const mx::array& importance, const mx::array& positions,
                                     const mx::array& new_keys, const mx::array& new_values,
                                     int position, int sink_size, std::optional<int> recent_start,
                                     RankedBy ranked_by, const std::optional<mx::array>& ranks,
                                     mx::StreamOrDevice s) {
  check_dimensions(kOperation, "keys", keys, 4, "[B, H, N, D]");
  check_dimensions(kOperation, "values", values, 4, "[B, H, N, Dv]");
  check_not_empty(kOperation, "keys", keys, "[B, H, N, D]");
  check_not_empty(kOperation, "values", values, "[B, H, N, Dv]");
  const mx::Shape rows{keys.shape(0), keys.shape(1), keys.shape(2)};
  if (mx::Shape{values.shape(0), values.shape(1), values.shape(2)} != rows) {
    fail(kOperation, "keys and values have shapes ", to_text(keys.shape()), " and ",
         to_text(values.shape()), ", expected the same [B, H, N].");
  }
  for (const auto& [name, dtype] :
       {std::pair("keys", keys.dtype()), std::pair("values", values.dtype())}) {
    if (is_float(dtype)) continue;
    fail(kOperation, name, " are ", to_text(dtype), ", expected float32, float16 or bfloat16.");
  }
  check_per_row("importance values", importance, rows, mx::float32);
  check_per_row("positions", positions, rows, mx::int32);
  check_like("new keys", new_keys, keys, "keys");
  check_like("new values", new_values, values, "values");
  if (position < 0) fail(kOperation, "position is ", position, ", expected 0 or more.");
  if (sink_size < 0) fail(kOperation, "sink_size is ", sink_size, ", expected 0 or more.");
  if (ranks.has_value() != (ranked_by == RankedBy::array)) {
    fail(kOperation, "ranks are ", ranks.has_value() ? "" : "not ",
         "given, expected an array of them exactly where rows are ranked by an array.");
  }
  if (ranks.has_value()) check_per_row("ranks", *ranks, rows, mx::float32);
  const mx::Stream stream = cpu_stream(kOperation, s);
  kernels::simd_target();  // refuses a wrong MLX_H2O_SIMD here, not inside the stream

  std::vector<mx::array> inputs{keys, values, importance, positions, new_keys, new_values};
  if (ranks.has_value()) inputs.push_back(*ranks);
  auto primitive = std::make_shared<ReplaceWorst>(
      stream, Settings{position, sink_size, recent_start, ranked_by});
  return mx::array::make_arrays(primitive->output_shapes(inputs),
                                {keys.dtype(), values.dtype(), mx::float32, mx::int32}, primitive,
                                inputs);
}

}  // namespace mlx_h2o
