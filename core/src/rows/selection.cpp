// The operation that chooses the rows to keep: checks, MLX primitive, hand-over to the kernel.
#include <memory>
#include <utility>

#include <mlx/ops.h>
#include <mlx/primitives.h>

#include "cpu/array_memory.h"
#include "cpu/checks.h"
#include "cpu/cpu_primitive.h"
#include "cpu/encoder.h"
#include "cpu/strided_copy.h"
#include "mlx_h2o/ops.h"
#include "rows/selection_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kKeepIndices = "keep_indices";

/// Inputs: scores float32 [B, H, N], positions int32 [B, H, N] and, where there is a window,
/// recent_start int32 [] or [B]. Output: uint32 [B, H, keep].
class KeepIndices : public CpuPrimitive {
 public:
  KeepIndices(mx::Stream stream, int keep, int sink_size)
      : CpuPrimitive(stream, kKeepIndices), keep_(keep), sink_size_(sink_size) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "KeepIndices"; }

  bool is_equivalent(const Primitive& other) const override {
    const auto& that = static_cast<const KeepIndices&>(other);
    return keep_ == that.keep_ && sink_size_ == that.sink_size_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {{inputs[0].shape(0), inputs[0].shape(1), keep_}};
  }

 private:
  int keep_;
  int sink_size_;
};

void KeepIndices::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const mx::array& scores = inputs[0];
  const mx::array& positions = inputs[1];
  mx::array& result = outputs[0];
  allocate(result);

  kernels::SelectionArguments a{};
  a.batch = scores.shape(0);
  a.heads = scores.shape(1);
  a.rows = scores.shape(2);
  copy_strides(scores, 3, a.score_strides);
  copy_strides(positions, 3, a.position_strides);
  a.sink_size = sink_size_;
  std::optional<mx::array> starts;
  if (inputs.size() == 3) {
    starts = mx::array::unsafe_weak_copy(inputs[2]);
    a.recent_start_stride = stride_of_sequences(inputs[2]);
  }

  // The stream keeps the buffers of inputs and outputs until its tasks are done, so the task holds
  // none; memory is asked for its address only then, when the inputs are there.
  mx::cpu::get_command_encoder(stream()).dispatch(
      [a, keep = keep_, scores = mx::array::unsafe_weak_copy(scores),
       positions = mx::array::unsafe_weak_copy(positions), starts = std::move(starts),
       result = mx::array::unsafe_weak_copy(result)]() mutable {
        a.scores = scores.data<float>();
        a.positions = positions.data<int32_t>();
        if (starts.has_value()) a.recent_start = starts->data<int32_t>();
        kernels::keep_indices(a, keep, result.data<uint32_t>());
      });
}

}  // namespace

mx::array keep_indices(const mx::array& scores, const mx::array& positions, int keep, int sink_size,
                       const std::optional<mx::array>& recent_start, mx::StreamOrDevice s) {
  Arguments given(kKeepIndices);
  given.array(found(scores));
  given.array(found(positions));
  given.integer("keep", keep);
  given.integer("sink_size", sink_size);
  std::vector<mx::array> inputs{scores, positions};
  if (recent_start.has_value()) {
    given.per_sequence("recent_start", found(*recent_start));
    inputs.push_back(*recent_start);
  }
  const mx::Stream stream = cpu_stream(kKeepIndices, s);
  return mx::array({scores.shape(0), scores.shape(1), keep}, mx::uint32,
                   std::make_shared<KeepIndices>(stream, keep, sink_size), std::move(inputs));
}

}  // namespace mlx_h2o
