// The operations that choose rows: checks, the MLX primitive, and the hand-over to the kernel.
#include "encoder.h"

#include <memory>
#include <utility>

#include <mlx/ops.h>
#include <mlx/primitives.h>

#include "array_memory.h"
#include "cpu_primitive.h"
#include "mlx_h2o/ops.h"
#include "selection_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

enum class Choice { keep, evict };

const char* operation_name(Choice choice) {
  return choice == Choice::keep ? "keep_indices" : "evict_indices";
}

/// Inputs: scores float32 [B, H, N], positions int32 [B, H, N] and, where there is a window,
/// recent_start int32 [] or [B]. Output: uint32 [B, H, count].
class SelectRows : public CpuPrimitive {
 public:
  SelectRows(mx::Stream stream, Choice choice, int count, int sink_size)
      : CpuPrimitive(stream, operation_name(choice)),
        choice_(choice),
        count_(count),
        sink_size_(sink_size) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override {
    return choice_ == Choice::keep ? "KeepIndices" : "EvictIndices";
  }

  bool is_equivalent(const Primitive& other) const override {
    const auto& that = static_cast<const SelectRows&>(other);
    return choice_ == that.choice_ && count_ == that.count_ && sink_size_ == that.sink_size_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {{inputs[0].shape(0), inputs[0].shape(1), count_}};
  }

 private:
  Choice choice_;
  int count_;
  int sink_size_;
};

void SelectRows::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const mx::array& scores = inputs[0];
  const mx::array& positions = inputs[1];
  mx::array& result = outputs[0];
  allocate(result);

  kernels::SelectionArguments a{};
  a.batch = scores.shape(0);
  a.heads = scores.shape(1);
  a.rows = scores.shape(2);
  for (int axis = 0; axis < 3; ++axis) {
    a.score_strides[axis] = scores.strides(axis);
    a.position_strides[axis] = positions.strides(axis);
  }
  a.sink_size = sink_size_;
  std::optional<mx::array> starts;
  if (inputs.size() == 3) {
    starts = mx::array::unsafe_weak_copy(inputs[2]);
    a.recent_start_stride = stride_of_sequences(inputs[2]);
  }
  a.target = kernels::simd_target();

  // The stream keeps the buffers of inputs and outputs until its tasks are done, so the task holds
  // none; memory is asked for its address only then, when the inputs are there.
  mx::cpu::get_command_encoder(stream()).dispatch(
      [a, choice = choice_, count = count_, scores = mx::array::unsafe_weak_copy(scores),
       positions = mx::array::unsafe_weak_copy(positions), starts = std::move(starts),
       result = mx::array::unsafe_weak_copy(result)]() mutable {
        a.scores = scores.data<float>();
        a.positions = positions.data<int32_t>();
        if (starts.has_value()) a.recent_start = starts->data<int32_t>();
        auto* to = result.data<uint32_t>();
        choice == Choice::keep ? kernels::keep_indices(a, count, to)
                               : kernels::evict_indices(a, count, to);
      });
}

mx::array select_rows(Choice choice, const char* count_name, const mx::array& scores,
                      const mx::array& positions, int count, int sink_size,
                      const std::optional<mx::array>& recent_start, mx::StreamOrDevice s) {
  const char* operation = operation_name(choice);
  check_dimensions(operation, "scores", scores, 3, "[B, H, N]");
  check_dimensions(operation, "positions", positions, 3, "[B, H, N]");
  if (scores.shape() != positions.shape()) {
    fail(operation, "scores and positions have shapes ", to_text(scores.shape()), " and ",
         to_text(positions.shape()), ", expected the same.");
  }
  check_not_empty(operation, "scores", scores, "[B, H, N]");
  if (scores.dtype() != mx::float32) {
    fail(operation, "scores are ", to_text(scores.dtype()), ", expected float32.");
  }
  if (positions.dtype() != mx::int32) {
    fail(operation, "positions are ", to_text(positions.dtype()), ", expected int32.");
  }
  if (count < 1 || count > scores.shape(2)) {
    fail(operation, count_name, " is ", count, ", expected 1 to N = ", scores.shape(2), '.');
  }
  if (sink_size < 0) fail(operation, "sink_size is ", sink_size, ", expected 0 or more.");
  std::vector<mx::array> inputs{scores, positions};
  if (recent_start.has_value()) {
    check_per_sequence(operation, "recent_start", *recent_start, scores.shape(0));
    inputs.push_back(*recent_start);
  }
  const mx::Stream stream = cpu_stream(operation, s);
  return mx::array({scores.shape(0), scores.shape(1), count}, mx::uint32,
                   std::make_shared<SelectRows>(stream, choice, count, sink_size),
                   std::move(inputs));
}

}  // namespace

mx::array keep_indices(const mx::array& scores, const mx::array& positions, int keep, int sink_size,
                       const std::optional<mx::array>& recent_start, mx::StreamOrDevice s) {
  return select_rows(Choice::keep, "keep", scores, positions, keep, sink_size, recent_start, s);
}

mx::array evict_indices(const mx::array& scores, const mx::array& positions, int count,
                        int sink_size, const std::optional<mx::array>& recent_start,
                        mx::StreamOrDevice s) {
  return select_rows(Choice::evict, "count", scores, positions, count, sink_size, recent_start, s);
}

}  // namespace mlx_h2o
