// The operation that chooses the rows to keep: checks, MLX primitive, kernel call.
#include "cpu/cpu_primitive.h"
#include "mlx_h2o/ops.h"
#include "rows/selection_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kKeepIndices = "keep_indices";

/// Inputs: scores float32 [B, H, N], positions int32 [B, H, N] and, if there is a window,
/// recent_start int32 [] or [B]. Output: uint32 [B, H, keep].
struct KeepIndices : CpuOperation {
  int keep, sink_size;

  bool operator==(const KeepIndices&) const = default;

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) const {
    return {{inputs[0].shape(0), inputs[0].shape(1), keep}};
  }

  void run(Arrays& inputs, Arrays& outputs) const {
    kernels::SelectionArguments a{};
    a.batch = inputs[0].shape(0);
    a.heads = inputs[0].shape(1);
    a.rows = inputs[0].shape(2);
    locate(inputs[0], a.scores, a.score_strides);
    locate(inputs[1], a.positions, a.position_strides);
    a.sink_size = sink_size;
    if (inputs.size() == 3) {
      a.recent_start = inputs[2].data<int32_t>();
      a.recent_start_stride = inputs[2].size() == 1 ? 0 : inputs[2].strides(0);
    }
    kernels::keep_indices(a, keep, outputs[0].data<uint32_t>());
  }
};

}  // namespace

mx::array keep_indices(const mx::array& scores, const mx::array& positions, int keep, int sink_size,
                       const std::optional<mx::array>& recent_start, mx::StreamOrDevice s) {
  Arguments given(kKeepIndices);
  given.array(found(scores));
  given.array(found(positions));
  given.integer("keep", keep);
  given.integer("sink_size", sink_size);
  Arrays inputs{scores, positions};
  if (recent_start.has_value()) {
    given.per_sequence("recent_start", found(*recent_start));
    inputs.push_back(*recent_start);
  }
  return outputs_of(kKeepIndices, KeepIndices{{}, keep, sink_size}, inputs, {mx::uint32}, s)[0];
}

}  // namespace mlx_h2o
