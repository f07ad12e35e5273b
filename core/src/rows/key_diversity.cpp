// The operation that ranks rows by their keys: checks, the MLX primitive, the hand-over.
#include <memory>
#include <utility>

#include <mlx/backend/cpu/encoder.h>

#include "cpu/array_memory.h"
#include "cpu/checks.h"
#include "cpu/cpu_primitive.h"
#include "cpu/element_type.h"
#include "cpu/strided_copy.h"
#include "mlx_h2o/ops.h"
#include "rows/key_diversity_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kKeyDiversity = "key_diversity";

/// Input: keys [B, H, N, D]. Output: float32 [B, H, N].
class KeyDiversity : public CpuPrimitive {
 public:
  explicit KeyDiversity(mx::Stream stream) : CpuPrimitive(stream, kKeyDiversity) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "KeyDiversity"; }

  bool is_equivalent(const Primitive&) const override { return true; }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const mx::Shape& keys = inputs[0].shape();
    return {{keys[0], keys[1], keys[2]}};
  }
};

void KeyDiversity::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  allocate(outputs[0]);
  const mx::array keys = with_unit_last_stride(inputs[0], encoder);

  kernels::KeyDiversityArguments a{};
  a.batch = keys.shape(0);
  a.heads = keys.shape(1);
  a.rows = keys.shape(2);
  a.width = keys.shape(3);
  a.type = element_type(keys.dtype());
  copy_strides(keys, 3, a.key_strides);

  // The stream keeps the buffers of inputs, outputs and temporaries until its tasks are done.
  encoder.dispatch([a, keys = mx::array::unsafe_weak_copy(keys),
                    result = mx::array::unsafe_weak_copy(outputs[0]),
                    target = kernels::simd_target()]() mutable {
    a.keys = keys.data<void>();
    a.result = result.data<float>();
    kernels::key_diversity(a, target);
  });
}

}  // namespace

mx::array key_diversity(const mx::array& keys, mx::StreamOrDevice s) {
  Arguments(kKeyDiversity).array(found(keys));
  const mx::Stream stream = cpu_stream(kKeyDiversity, s);
  kernels::simd_target();  // refuses a wrong MLX_H2O_SIMD here, not inside the stream
  auto primitive = std::make_shared<KeyDiversity>(stream);
  const mx::Shape& shape = keys.shape();
  return mx::array({shape[0], shape[1], shape[2]}, mx::float32, std::move(primitive), {keys});
}

}  // namespace mlx_h2o
