// The operation that merges rows: checks, the MLX primitive, and the hand-over to the kernel.
#include "encoder.h"

#include <memory>
#include <utility>
#include <vector>

#include "array_memory.h"
#include "cpu_primitive.h"
#include "element_type.h"
#include "merging_kernel.h"
#include "mlx_h2o/ops.h"
#include "strided_copy.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr const char* kMergers = "mergers";

/// Inputs: keys, values, the bias and the positions of the rows, and recent_start. Outputs: the
/// slots that stay, and slots, keys, values, bias and positions of the rows that change.
class Mergers : public CpuPrimitive {
 public:
  Mergers(mx::Stream stream, int keep, int sink_size)
      : CpuPrimitive(stream, kMergers), keep_(keep), sink_size_(sink_size) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  const char* name() const override { return "Mergers"; }

  bool is_equivalent(const Primitive& other) const override {
    const auto& that = static_cast<const Mergers&>(other);
    return keep_ == that.keep_ && sink_size_ == that.sink_size_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const mx::Shape& keys = inputs[0].shape();
    const int going = keys[2] - keep_;
    const mx::Shape some{keys[0], keys[1], going};
    return {{keys[0], keys[1], keep_},
            some,
            {keys[0], keys[1], going, keys[3]},
            {keys[0], keys[1], going, inputs[1].shape(3)},
            some,
            some};
  }

 private:
  int keep_, sink_size_;
};

void Mergers::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  std::vector<mx::array> held{with_unit_last_stride(inputs[0], encoder),
                              with_unit_last_stride(inputs[1], encoder)};
  held.insert(held.end(), inputs.begin() + 2, inputs.end());
  const mx::array &keys = held[0], &values = held[1];
  kernels::MergingArguments a{};
  a.batch = keys.shape(0);
  a.heads = keys.shape(1);
  a.rows = keys.shape(2);
  a.width = keys.shape(3);
  a.value_width = values.shape(3);
  a.keep = keep_;
  a.type = element_type(keys.dtype());
  copy_strides(keys, 3, a.key_strides);
  copy_strides(values, 3, a.value_strides);
  copy_strides(held[2], 3, a.bias_strides);
  copy_strides(held[3], 3, a.position_strides);
  a.sink_size = sink_size_;
  a.recent_start_stride = stride_of_sequences(held[4]);
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
    a.positions = (next++)->data<int32_t>();
    a.recent_start = (next++)->data<int32_t>();
    a.kept = (next++)->data<uint32_t>();
    a.into = (next++)->data<uint32_t>();
    a.new_keys = (next++)->data<void>();
    a.new_values = (next++)->data<void>();
    a.new_bias = (next++)->data<float>();
    a.new_positions = (next++)->data<int32_t>();
    kernels::mergers(a, target);
  });
}

void check_rows(const char* name, const mx::array& array, mx::Dtype dtype, const mx::Shape& rows) {
  if (array.dtype() != dtype || array.shape() != rows) {
    fail(kMergers, name, " are ", to_text(array.dtype()), ' ', to_text(array.shape()),
         ", expected ", to_text(dtype), " [B, H, N] = ", to_text(rows), '.');
  }
}

}  // namespace

std::vector<mx::array> mergers(const mx::array& keys, const mx::array& values,
                               const mx::array& bias, const mx::array& positions, int keep,
                               int sink_size, const mx::array& recent_start, mx::StreamOrDevice s) {
  for (const auto& [name, rows] : {std::pair("keys", &keys), std::pair("values", &values)}) {
    check_dimensions(kMergers, name, *rows, 4, "[B, H, N, D]");
    check_not_empty(kMergers, name, *rows, "[B, H, N, D]");
  }
  const mx::Shape rows{keys.shape(0), keys.shape(1), keys.shape(2)};
  if (!is_float(keys.dtype()) || keys.dtype() != values.dtype() ||
      mx::Shape{values.shape(0), values.shape(1), values.shape(2)} != rows) {
    fail(kMergers, "keys are ", to_text(keys.dtype()), ' ', to_text(keys.shape()), " and values ",
         to_text(values.dtype()), ' ', to_text(values.shape()),
         ", expected as many rows of one float dtype.");
  }
  check_rows("bias", bias, mx::float32, rows);
  check_rows("positions", positions, mx::int32, rows);
  check_per_sequence(kMergers, "recent_start", recent_start, rows[0]);
  if (keep < 1 || keep >= rows[2]) {
    fail(kMergers, "keep is ", keep, ", expected 1 to N - 1 = ", rows[2] - 1, '.');
  }
  const mx::Stream stream = cpu_stream(kMergers, s);
  kernels::simd_target();  // refuses a wrong MLX_H2O_SIMD here, not inside the stream
  const std::vector<mx::array> inputs{keys, values, bias, positions, recent_start};
  auto primitive = std::make_shared<Mergers>(stream, keep, sink_size);
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  return mx::array::make_arrays(
      std::move(shapes),
      {mx::uint32, mx::uint32, keys.dtype(), keys.dtype(), mx::float32, mx::int32}, primitive,
      inputs);
}

}  // namespace mlx_h2o
