// The operation that chooses the rows to keep: checks, MLX primitive, kernel call.
#include <memory>
#include <utility>

#include <mlx/ops.h>

#include "cpu/checks.h"
#include "cpu/new_arrays.h"
#include "mlx_h2o/ops.h"
#include "rows/selection_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kKeepIndices = "keep_indices";

/// Inputs: scores float32 [B, H, N], positions int32 [B, H, N] and, if there is a window,
/// recent_start int32 [] or [B]. Output: uint32 [B, H, keep].
class KeepIndices : public NewArrays {
 public:
  KeepIndices(mx::Stream stream, int keep, int sink_size)
      : NewArrays(stream, kKeepIndices), keep_(keep), sink_size_(sink_size) {}

  const char* name() const override { return "KeepIndices"; }

  bool is_equivalent(const Primitive& other) const override {
    const auto& that = static_cast<const KeepIndices&>(other);
    return keep_ == that.keep_ && sink_size_ == that.sink_size_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {{inputs[0].shape(0), inputs[0].shape(1), keep_}};
  }

 protected:
  void dispatch(mx::cpu::CommandEncoder& encoder, std::vector<mx::array> inputs,
                std::vector<mx::array> outputs) override {
    encoder.dispatch([keep = keep_, sink_size = sink_size_, inputs = std::move(inputs),
                      outputs = std::move(outputs)]() mutable {
      const mx::array &scores = inputs[0], &positions = inputs[1];
      kernels::SelectionArguments a{};
      a.batch = scores.shape(0);
      a.heads = scores.shape(1);
      a.rows = scores.shape(2);
      a.scores = scores.data<float>();
      copy_strides(scores, 3, a.score_strides);
      a.positions = positions.data<int32_t>();
      copy_strides(positions, 3, a.position_strides);
      a.sink_size = sink_size;
      if (inputs.size() == 3) {
        a.recent_start = inputs[2].data<int32_t>();
        a.recent_start_stride = stride_of_sequences(inputs[2]);
      }
      kernels::keep_indices(a, keep, outputs[0].data<uint32_t>());
    });
  }

 private:
  int keep_;
  int sink_size_;
};

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
