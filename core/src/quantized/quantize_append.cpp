// The operation that quantises rows into their slots: checks, the MLX primitive, the kernel call.
#include <memory>
#include <utility>

#include "cpu/checks.h"
#include "cpu/cpu_primitive.h"
#include "cpu/donation.h"
#include "cpu/element_type.h"
#include "cpu/strided_copy.h"
#include "mlx_h2o/ops.h"
#include "quantized/quantization_kernel.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kQuantizeAppend = "quantize_append";

/// The number of arrays that keys and values are stored in, and the settings.
struct AppendSettings {
  int arrays[2];  // 1: dense; 2: words and norms; 3: words, scales and biases
  int bits[2];
  int group_size;

  bool operator==(const AppendSettings&) const = default;
  size_t stored() const { return static_cast<size_t>(arrays[0]) + static_cast<size_t>(arrays[1]); }
};

/// Inputs: the arrays of the keys, those of the values, new keys, new values, and the slots.
/// Outputs: the stored arrays, each in the buffer of its input if nothing else holds it.
class QuantizeAppend : public CpuPrimitive {
 public:
  QuantizeAppend(mx::Stream stream, const AppendSettings& settings)
      : CpuPrimitive(stream, kQuantizeAppend), settings_(settings) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "QuantizeAppend"; }

  bool is_equivalent(const Primitive& other) const override {
    return settings_ == static_cast<const QuantizeAppend&>(other).settings_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < settings_.stored(); ++i) shapes.push_back(inputs[i].shape());
    return shapes;
  }

 private:
  AppendSettings settings_;
};

void QuantizeAppend::eval_cpu(const std::vector<mx::array>& inputs,
                              std::vector<mx::array>& outputs) {
  release_sibling_inputs(inputs, outputs);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  const size_t stored = settings_.stored();
  std::vector<bool> in_place;
  std::vector<mx::array> held;
  for (size_t i = 0; i < stored; ++i) {
    in_place.push_back(take_over(inputs[i], outputs[i]));
    held.push_back(mx::array::unsafe_weak_copy(outputs[i]));
  }
  kernels::QuantizationArguments arguments[2] = {};
  for (size_t tensor = 0; tensor < 2; ++tensor) {
    const mx::array rows = with_unit_last_stride(inputs[stored + tensor], encoder);
    kernels::QuantizationArguments& a = arguments[tensor];
    a.batch = rows.shape(0);
    a.heads = rows.shape(1);
    a.new_rows = rows.shape(2);
    a.width = rows.shape(3);
    a.rows = outputs[tensor * static_cast<size_t>(settings_.arrays[0])].shape(2);
    a.to.bits = settings_.bits[tensor];
    a.to.group_size = settings_.group_size;
    if (settings_.arrays[tensor] == 2) {
      a.to.group_size = a.width;
      a.to.codes = &kernels::codebook(a.width, a.to.bits,
                                      tensor == 0 ? kernels::kKeySeed : kernels::kValueSeed);
    }
    a.type = element_type(rows.dtype());
    copy_strides(rows, 3, a.from_strides);
    copy_strides(inputs[stored + 2], 3, a.slot_strides);
    held.push_back(mx::array::unsafe_weak_copy(rows));
  }
  for (const mx::array& input : inputs) held.push_back(mx::array::unsafe_weak_copy(input));

  // The stream keeps the buffers of inputs, outputs and temporaries until its tasks are done.
  encoder.dispatch([keys = arguments[0], values = arguments[1], held = std::move(held),
                    in_place = std::move(in_place), settings = settings_, stored,
                    target = kernels::simd_target()]() mutable {
    const size_t first_input = stored + 2;
    for (size_t i = 0; i < stored; ++i) {
      if (!in_place[i]) copy_elements(held[first_input + i], held[i].data<void>());
    }
    auto part = held.begin();
    for (size_t tensor = 0; tensor < 2; ++tensor) {
      kernels::QuantizationArguments& a = tensor == 0 ? keys : values;
      const int arrays = settings.arrays[tensor];
      if (arrays == 1) {
        a.dense = (part++)->data<void>();
      } else {
        a.to.words = (part++)->data<uint32_t>();
        a.to.scales = (part++)->data<void>();
        if (arrays == 3) a.to.biases = (part++)->data<void>();
      }
      a.from = held[stored + tensor].data<void>();
      a.slots = held.back().data<uint32_t>();
      kernels::quantize_rows(a, target);
    }
  });
}

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
  const AppendSettings settings{
      {static_cast<int>(keys.size()), static_cast<int>(values.size())}, {bits, v_bits}, group_size};
  const auto primitive = std::make_shared<QuantizeAppend>(cpu_stream(kQuantizeAppend, s), settings);
  std::vector<mx::array> inputs(keys);
  inputs.insert(inputs.end(), values.begin(), values.end());
  inputs.insert(inputs.end(), {new_keys, new_values, slots});
  std::vector<mx::Dtype> dtypes;
  for (size_t i = 0; i < settings.stored(); ++i) dtypes.push_back(inputs[i].dtype());
  return mx::array::make_arrays(primitive->output_shapes(inputs), dtypes, primitive, inputs);
}

}  // namespace mlx_h2o
