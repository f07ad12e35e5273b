// The operation that ranks rows by their keys: checks, the MLX primitive, the kernel call.
#include "cpu/cpu_primitive.h"
#include "cpu/element_type.h"
#include "mlx_h2o/ops.h"
#include "rows/key_diversity_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kKeyDiversity = "key_diversity";

/// Input: keys [B, H, N, D]. Output: float32 [B, H, N].
struct KeyDiversity : CpuOperation {
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) const {
    const mx::Shape& keys = inputs[0].shape();
    return {{keys[0], keys[1], keys[2]}};
  }
  Layout layout(size_t /*input*/) const { return Layout::unit_last_stride; }

  void run(Arrays& inputs, Arrays& outputs) const {
    const mx::array& keys = inputs[0];
    kernels::KeyDiversityArguments a{};
    a.batch = keys.shape(0);
    a.heads = keys.shape(1);
    a.rows = keys.shape(2);
    a.width = keys.shape(3);
    a.type = element_type(keys.dtype());
    locate(keys, a.keys, a.key_strides);
    a.result = outputs[0].data<float>();
    kernels::key_diversity(a, kernels::simd_target());
  }
};

}  // namespace

mx::array key_diversity(const mx::array& keys, mx::StreamOrDevice s) {
  Arguments(kKeyDiversity).array(found(keys));
  return outputs_of(kKeyDiversity, KeyDiversity{}, {keys}, {mx::float32}, s)[0];
}

}  // namespace mlx_h2o
