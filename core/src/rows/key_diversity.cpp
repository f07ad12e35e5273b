// The operation that ranks rows by their keys: checks, the MLX primitive, the kernel call.
#include <memory>
#include <utility>

#include "cpu/checks.h"
#include "cpu/element_type.h"
#include "cpu/new_arrays.h"
#include "mlx_h2o/ops.h"
#include "rows/key_diversity_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kKeyDiversity = "key_diversity";

/// Input: keys [B, H, N, D]. Output: float32 [B, H, N].
class KeyDiversity : public NewArrays {
 public:
  explicit KeyDiversity(mx::Stream stream) : NewArrays(stream, kKeyDiversity) {}

  const char* name() const override { return "KeyDiversity"; }

  bool is_equivalent(const Primitive&) const override { return true; }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const mx::Shape& keys = inputs[0].shape();
    return {{keys[0], keys[1], keys[2]}};
  }

 protected:
  void dispatch(mx::cpu::CommandEncoder& encoder, std::vector<mx::array> inputs,
                std::vector<mx::array> outputs) override {
    const mx::array with_unit_stride = with_unit_last_stride(inputs[0], encoder);
    encoder.dispatch([keys = mx::array::unsafe_weak_copy(with_unit_stride),
                      outputs = std::move(outputs), target = kernels::simd_target()]() mutable {
      kernels::KeyDiversityArguments a{};
      a.batch = keys.shape(0);
      a.heads = keys.shape(1);
      a.rows = keys.shape(2);
      a.width = keys.shape(3);
      a.type = element_type(keys.dtype());
      a.keys = keys.data<void>();
      copy_strides(keys, 3, a.key_strides);
      a.result = outputs[0].data<float>();
      kernels::key_diversity(a, target);
    });
  }
};

}  // namespace

mx::array key_diversity(const mx::array& keys, mx::StreamOrDevice s) {
  Arguments(kKeyDiversity).array(found(keys));
  const mx::Stream stream = cpu_stream(kKeyDiversity, s);
  auto primitive = std::make_shared<KeyDiversity>(stream);
  const mx::Shape& shape = keys.shape();
  return mx::array({shape[0], shape[1], shape[2]}, mx::float32, std::move(primitive), {keys});
}

}  // namespace mlx_h2o
