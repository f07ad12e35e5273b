// The operation that folds rows into others: argument checks, the MLX primitive, the kernel call.
#include <memory>
#include <utility>
#include <vector>

#include "cpu/array_memory.h"
#include "cpu/checks.h"
#include "cpu/cpu_primitive.h"
#include "cpu/element_type.h"
#include "cpu/encoder.h"
#include "cpu/strided_copy.h"
#include "folding/folding_kernel.h"
#include "mlx_h2o/ops.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kFold = "fold";

/// Inputs: keys, values, bias, mass, weights and eligibility of the rows, and the slots that stay.
/// Outputs: slots, keys, values, bias and mass of the changed rows.
class Fold : public CpuPrimitive {
 public:
  Fold(mx::Stream stream, double share) : CpuPrimitive(stream, kFold), share_(share) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "Fold"; }

  bool is_equivalent(const Primitive& other) const override {
    return share_ == static_cast<const Fold&>(other).share_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const mx::Shape& keys = inputs[0].shape();
    const int going = keys[2] - inputs[6].shape(2);
    const mx::Shape some{keys[0], keys[1], going};
    return {some,
            {keys[0], keys[1], going, keys[3]},
            {keys[0], keys[1], going, inputs[1].shape(3)},
            some,
            some};
  }

 private:
  double share_;
};

void Fold::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  std::vector<mx::array> held{with_unit_last_stride(inputs[0], encoder),
                              with_unit_last_stride(inputs[1], encoder)};
  held.insert(held.end(), inputs.begin() + 2, inputs.end());
  const mx::array &keys = held[0], &values = held[1];
  kernels::FoldingArguments a{};
  a.batch = keys.shape(0);
  a.heads = keys.shape(1);
  a.rows = keys.shape(2);
  a.width = keys.shape(3);
  a.value_width = values.shape(3);
  a.keep = held[6].shape(2);
  a.share = share_;
  a.type = element_type(keys.dtype());
  copy_strides(keys, 3, a.key_strides);
  copy_strides(values, 3, a.value_strides);
  copy_strides(held[2], 3, a.bias_strides);
  copy_strides(held[3], 3, a.mass_strides);
  copy_strides(held[4], 3, a.weight_strides);
  copy_strides(held[5], 3, a.eligible_strides);
  copy_strides(held[6], 3, a.kept_strides);
  for (mx::array& output : outputs) {
    allocate(output);
    held.push_back(output);
  }
  // The stream keeps the buffers until its tasks are done, so the task holds none.
  for (mx::array& array : held) array = mx::array::unsafe_weak_copy(array);
  encoder.dispatch([a, held = std::move(held), target = kernels::simd_target()]() mutable {
    auto next = held.begin();
    a.keys = (next++)->data<void>();
    a.values = (next++)->data<void>();
    a.bias = (next++)->data<float>();
    a.mass = (next++)->data<float>();
    a.weights = (next++)->data<float>();
    a.eligible = (next++)->data<bool>();
    a.kept = (next++)->data<uint32_t>();
    a.into = (next++)->data<uint32_t>();
    a.new_keys = (next++)->data<void>();
    a.new_values = (next++)->data<void>();
    a.new_bias = (next++)->data<float>();
    a.new_mass = (next++)->data<float>();
    kernels::fold(a, target);
  });
}

}  // namespace

std::vector<mx::array> fold(const mx::array& keys, const mx::array& values, const mx::array& bias,
                            const mx::array& mass, const mx::array& weights,
                            const mx::array& eligible, const mx::array& kept, double share,
                            mx::StreamOrDevice s) {
  const std::vector<mx::array> inputs{keys, values, bias, mass, weights, eligible, kept};
  Arguments given(kFold);
  for (const mx::array& input : inputs) given.array(found(input));
  given.number("share", share);
  const mx::Stream stream = cpu_stream(kFold, s);
  auto primitive = std::make_shared<Fold>(stream, share);
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  return mx::array::make_arrays(std::move(shapes),
                                {mx::uint32, keys.dtype(), keys.dtype(), mx::float32, mx::float32},
                                primitive, inputs);
}

}  // namespace mlx_h2o
