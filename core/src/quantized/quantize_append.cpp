// The operation that quantises rows into their slots: checks, the MLX primitive, the hand-over.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include <mlx/backend/cpu/encoder.h>

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

/// How many arrays keys and values are stored in, and with what settings.
struct AppendSettings {
  int arrays[2];  // 1: dense; 2: words and norms; 3: words, scales and biases
  int bits[2];
  int group_size;
  std::optional<int> start;

  bool operator==(const AppendSettings&) const = default;
  size_t stored() const { return static_cast<size_t>(arrays[0]) + static_cast<size_t>(arrays[1]); }
};

/// Inputs: the arrays of the keys, those of the values, new keys, new values, and the slots unless
/// the new rows go to those from `start` on. Outputs: the stored arrays, in the buffers of the
/// inputs where nothing else holds those; with a start also their slots in use, as views.
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
    const size_t stored = settings_.stored();
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < stored; ++i) shapes.push_back(inputs[i].shape());
    for (size_t i = 0; settings_.start && i < stored; ++i) {
      shapes.push_back(inputs[i].shape());
      shapes.back()[2] = *settings_.start + inputs[stored].shape(2);
    }
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
  for (size_t i = stored; i < outputs.size(); ++i) {
    const mx::array& whole = outputs[i - stored];
    const bool all = outputs[i].size() == whole.size();
    outputs[i].copy_shared_buffer(whole, whole.strides(),
                                  all ? whole.flags() : mx::array::Flags{false, false, false},
                                  whole.data_size());
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
    a.start = settings_.start.value_or(0);
    for (int axis = 0; axis < 3; ++axis) {
      a.from_strides[axis] = rows.strides(axis);
      if (!settings_.start) a.slot_strides[axis] = inputs[stored + 2].strides(axis);
    }
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
      a.slots = settings.start ? nullptr : held.back().data<uint32_t>();
      kernels::quantize_rows(a, target);
    }
  });
}

// Rows that are stored as one array, or as words and norms.
void check_others(const char* name, const std::vector<mx::array>& stored, const mx::array& rows,
                  int bits) {
  const int width = rows.shape(3);
  const bool codes = stored.size() == 2;
  if (codes && (bits > 4 || !kernels::has_codebook(width))) {
    fail(kQuantizeAppend, "rows of ", name, " have ", width, " elements and codes of ", bits,
         " bits, expected a power of two from 32 to 1024, and 2, 3 or 4 bits.");
  }
  mx::Shape expected = stored[0].shape();
  expected[0] = rows.shape(0);
  expected[1] = rows.shape(1);
  expected[3] = codes ? width * bits / 32 : width;
  for (const mx::array& part : stored) {
    const mx::Dtype dtype = !codes ? rows.dtype() : &part == &stored[0] ? mx::uint32 : mx::float32;
    if (part.shape() != expected || part.dtype() != dtype) {
      fail(kQuantizeAppend, name, " are ", to_text(part.dtype()), ' ', to_text(part.shape()),
           ", expected ", to_text(dtype), ' ', to_text(expected), '.');
    }
    expected[3] = 1;
  }
}

void check_packed(const char* name, const std::vector<mx::array>& packed, const mx::array& rows,
                  int bits, int group_size) {
  if (packed.empty() || packed.size() > 3) {
    fail(kQuantizeAppend, name, " are ", packed.size(),
         " arrays, expected words, scales and biases, or words and norms, or rows.");
  }
  check_dimensions(kQuantizeAppend, name, packed[0], 4, "[B, H, N, D * bits / 32]");
  check_not_empty(kQuantizeAppend, name, packed[0], "[B, H, N, D * bits / 32]");
  check_dimensions(kQuantizeAppend, "new rows", rows, 4, "[B, H, L, D]");
  check_not_empty(kQuantizeAppend, "new rows", rows, "[B, H, L, D]");
  if (!is_float(rows.dtype())) {
    fail(kQuantizeAppend, "new rows are ", to_text(rows.dtype()),
         ", expected float32, float16 or bfloat16.");
  }
  if (packed.size() < 3) return check_others(name, packed, rows, bits);
  const int width = rows.shape(3);
  if (width % group_size != 0) {
    fail(kQuantizeAppend, "rows of ", name, " have ", width,
         " elements, expected a multiple of "
         "group_size = ",
         group_size, '.');
  }
  mx::Shape expected = packed[0].shape();
  expected[0] = rows.shape(0);
  expected[1] = rows.shape(1);
  const int last[3] = {width * bits / 32, width / group_size, width / group_size};
  for (size_t i = 0; i < 3; ++i) {
    expected[3] = last[i];
    const mx::Dtype dtype = i == 0 ? mx::uint32 : rows.dtype();
    if (packed[i].shape() == expected && packed[i].dtype() == dtype) continue;
    const char* parts[] = {"words", "scales", "biases"};
    fail(kQuantizeAppend, parts[i], " of ", name, " are ", to_text(packed[i].dtype()), ' ',
         to_text(packed[i].shape()), ", expected ", to_text(dtype), ' ', to_text(expected), '.');
  }
}

void check_settings(const std::vector<mx::array>& keys, const std::vector<mx::array>& values,
                    const mx::array& new_keys, const mx::array& new_values, int bits,
                    int group_size, int v_bits) {
  for (int found : {bits, v_bits}) {
    if (found == 2 || found == 3 || found == 4 || found == 5 || found == 6 || found == 8) continue;
    fail(kQuantizeAppend, "bits are ", found, ", expected 2, 3, 4, 5, 6 or 8.");
  }
  if (group_size != 32 && group_size != 64 && group_size != 128) {
    fail(kQuantizeAppend, "group_size is ", group_size, ", expected 32, 64 or 128.");
  }
  check_packed("keys", keys, new_keys, bits, group_size);
  check_packed("values", values, new_values, v_bits, group_size);
  const mx::Shape new_rows{new_keys.shape(0), new_keys.shape(1), new_keys.shape(2)};
  if (mx::Shape{new_values.shape(0), new_values.shape(1), new_values.shape(2)} != new_rows) {
    fail(kQuantizeAppend, "new keys and values have shapes ", to_text(new_keys.shape()), " and ",
         to_text(new_values.shape()), ", expected the same [B, H, L].");
  }
}

std::vector<mx::array> written(const std::vector<mx::array>& keys,
                               const std::vector<mx::array>& values, std::vector<mx::array> rows,
                               int bits, int v_bits, int group_size, std::optional<int> start,
                               mx::StreamOrDevice s) {
  kernels::simd_target();  // refuses a wrong MLX_H2O_SIMD here, not inside the stream
  const AppendSettings settings{{static_cast<int>(keys.size()), static_cast<int>(values.size())},
                                {bits, v_bits},
                                group_size,
                                start};
  const auto primitive = std::make_shared<QuantizeAppend>(cpu_stream(kQuantizeAppend, s), settings);
  std::vector<mx::array> inputs(keys);
  inputs.insert(inputs.end(), values.begin(), values.end());
  inputs.insert(inputs.end(), rows.begin(), rows.end());
  const std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  std::vector<mx::Dtype> dtypes;
  const size_t stored = settings.stored();  // with a start, the same once more as views
  for (size_t i = 0; i < shapes.size(); ++i)
    dtypes.push_back(inputs[i < stored ? i : i - stored].dtype());
  return mx::array::make_arrays(shapes, dtypes, primitive, inputs);
}

}  // namespace

std::vector<mx::array> quantize_append(const std::vector<mx::array>& keys,
                                       const std::vector<mx::array>& values,
                                       const mx::array& new_keys, const mx::array& new_values,
                                       const mx::array& slots, int bits, int group_size, int v_bits,
                                       mx::StreamOrDevice s) {
  check_settings(keys, values, new_keys, new_values, bits, group_size, v_bits);
  if (keys[0].shape(2) != values[0].shape(2)) {
    fail(kQuantizeAppend, "keys and values have ", keys[0].shape(2), " and ", values[0].shape(2),
         " rows, expected the same.");
  }
  const mx::Shape new_rows{new_keys.shape(0), new_keys.shape(1), new_keys.shape(2)};
  if (slots.shape() != new_rows || slots.dtype() != mx::uint32) {
    fail(kQuantizeAppend, "slots are ", to_text(slots.dtype()), ' ', to_text(slots.shape()),
         ", expected uint32 [B, H, L] = ", to_text(new_rows), '.');
  }
  return written(keys, values, {new_keys, new_values, slots}, bits, v_bits, group_size, {}, s);
}

std::vector<mx::array> append_quantized(const std::vector<mx::array>& keys,
                                        const std::vector<mx::array>& values,
                                        const mx::array& new_keys, const mx::array& new_values,
                                        int start, int bits, int group_size, int v_bits,
                                        mx::StreamOrDevice s) {
  check_settings(keys, values, new_keys, new_values, bits, group_size, v_bits);
  const int room = std::min(keys[0].shape(2), values[0].shape(2));
  if (start < 0 || new_keys.shape(2) > room - start) {
    fail(kQuantizeAppend, "found ", new_keys.shape(2), " rows from slot ", start,
         " on for a buffer of ", room, ", expected them within it.");
  }
  return written(keys, values, {new_keys, new_values}, bits, v_bits, group_size, start, s);
}

}  // namespace mlx_h2o
