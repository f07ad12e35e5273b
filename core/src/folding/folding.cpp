// The operation that folds rows into others: argument checks, the MLX primitive, the kernel call.
#include "cpu/cpu_primitive.h"
#include "cpu/element_type.h"
#include "folding/folding_kernel.h"
#include "mlx_h2o/ops.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kFold = "fold";

/// Inputs: keys, values, bias, mass, weights and eligibility of the rows, and the slots that stay.
/// Outputs: slots, keys, values, bias and mass of the changed rows.
struct Fold : CpuOperation {
  double share;

  bool operator==(const Fold&) const = default;

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) const {
    const mx::Shape& keys = inputs[0].shape();
    const int going = keys[2] - inputs[6].shape(2);
    const mx::Shape some{keys[0], keys[1], going};
    return {some,
            {keys[0], keys[1], going, keys[3]},
            {keys[0], keys[1], going, inputs[1].shape(3)},
            some,
            some};
  }
  Layout layout(size_t input) const { return input < 2 ? Layout::unit_last_stride : Layout::any; }

  void run(Arrays& inputs, Arrays& outputs) const {
    const mx::array &keys = inputs[0], &values = inputs[1];
    kernels::FoldingArguments a{};
    a.batch = keys.shape(0);
    a.heads = keys.shape(1);
    a.rows = keys.shape(2);
    a.width = keys.shape(3);
    a.value_width = values.shape(3);
    a.keep = inputs[6].shape(2);
    a.share = share;
    a.type = element_type(keys.dtype());
    locate(keys, a.keys, a.key_strides);
    locate(values, a.values, a.value_strides);
    locate(inputs[2], a.bias, a.bias_strides);
    locate(inputs[3], a.mass, a.mass_strides);
    locate(inputs[4], a.weights, a.weight_strides);
    locate(inputs[5], a.eligible, a.eligible_strides);
    locate(inputs[6], a.kept, a.kept_strides);
    a.into = outputs[0].data<uint32_t>();
    a.new_keys = outputs[1].data<void>();
    a.new_values = outputs[2].data<void>();
    a.new_bias = outputs[3].data<float>();
    a.new_mass = outputs[4].data<float>();
    kernels::fold(a, kernels::simd_target());
  }
};

}  // namespace

std::vector<mx::array> fold(const mx::array& keys, const mx::array& values, const mx::array& bias,
                            const mx::array& mass, const mx::array& weights,
                            const mx::array& eligible, const mx::array& kept, double share,
                            mx::StreamOrDevice s) {
  const Arrays inputs{keys, values, bias, mass, weights, eligible, kept};
  Arguments given(kFold);
  for (const mx::array& input : inputs) given.array(found(input));
  given.number("share", share);
  return outputs_of(kFold, Fold{{}, share}, inputs,
                    {mx::uint32, keys.dtype(), keys.dtype(), mx::float32, mx::float32}, s);
}

}  // namespace mlx_h2o
