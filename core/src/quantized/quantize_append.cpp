// The operation that quantises rows into their slots: checks, the MLX primitive, the kernel call.
#include "cpu/cpu_primitive.h"
#include "mlx_h2o/ops.h"
#include "quantized/stored_rows.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kQuantizeAppend = "quantize_append";

/// Inputs: the arrays of the keys, those of the values, new keys, new values, and the slots.
/// Outputs: the stored arrays, each in the buffer of its input if nothing else holds it.
struct QuantizeAppend : CpuOperation {
  size_t
      arrays[2];  // of keys and of values: 1: dense; 2: words and norms; 3: words, scales, biases
  int bits[2];
  int group_size;

  bool operator==(const QuantizeAppend&) const = default;
  size_t stored() const { return arrays[0] + arrays[1]; }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) const {
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < stored(); ++i) shapes.push_back(inputs[i].shape());
    return shapes;
  }
  Layout layout(size_t input) const {
    const bool is_new = input == stored() || input == stored() + 1;
    return is_new ? Layout::unit_last_stride : Layout::any;
  }
  int origin(size_t output) const { return static_cast<int>(output); }

  void run(Arrays& inputs, Arrays& outputs) const {
    mx::array* parts = outputs.data();
    for (size_t tensor = 0; tensor < 2; parts += arrays[tensor++]) {
      const mx::array& rows = inputs[stored() + tensor];
      kernels::QuantizationArguments a{};
      a.batch = rows.shape(0);
      a.heads = rows.shape(1);
      a.new_rows = rows.shape(2);
      a.rows = parts[0].shape(2);
      a.to = stored_rows(parts, arrays[tensor], rows.dtype(), rows.shape(3), bits[tensor],
                         group_size, tensor == 0 ? kernels::kKeySeed : kernels::kValueSeed);
      locate(rows, a.from, a.from_strides);
      locate(inputs.back(), a.slots, a.slot_strides);
      kernels::quantize_rows(a, kernels::simd_target());
    }
  }
};

}  // namespace

std::vector<mx::array> quantize_append(const std::vector<mx::array>& keys,
                                       const std::vector<mx::array>& values,
                                       const mx::array& new_keys, const mx::array& new_values,
                                       const mx::array& slots, int bits, int group_size, int v_bits,
                                       mx::StreamOrDevice s) {
  Arguments given(kQuantizeAppend);
  given.packing(bits, v_bits, group_size);
  given.array(found(new_keys));
  given.array(found(new_values));
  for (const auto* stored : {&keys, &values}) {
    if (stored->empty() || stored->size() > 3) {
      fail(kQuantizeAppend, stored == &keys ? "keys" : "values", " are ", stored->size(),
           " arrays, expected words, scales and biases, or words and norms, or rows.");
    }
    give_rows(given, *stored);
  }
  given.array(found(slots));
  Arrays inputs(keys);
  inputs.insert(inputs.end(), values.begin(), values.end());
  std::vector<mx::Dtype> dtypes;
  for (const mx::array& stored : inputs) dtypes.push_back(stored.dtype());
  inputs.insert(inputs.end(), {new_keys, new_values, slots});
  const QuantizeAppend operation{{}, {keys.size(), values.size()}, {bits, v_bits}, group_size};
  return outputs_of(kQuantizeAppend, operation, inputs, dtypes, s);
}

}  // namespace mlx_h2o
