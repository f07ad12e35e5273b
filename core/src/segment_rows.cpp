// Rows that are stored in segments as one array of keys and one of values.
#include <cstring>
#include <memory>
#include <utility>

#include "element_type.h"
#include "half.h"
#include "mlx_h2o/ops.h"
#include "new_arrays.h"
#include "row_kernel.h"
#include "segment_checks.h"
#include "thread_pool.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

constexpr size_t kPerTier = 6;  // words, scales and biases of keys, and of values

template <typename T>
void round_row(const std::vector<float>& row, void* to) {
  T* elements = static_cast<T*>(to);
  for (size_t d = 0; d < row.size(); ++d) elements[d] = kernels::round_to<T>(row[d]);
}

void round_row(kernels::ElementType type, const std::vector<float>& row, void* to) {
  switch (type) {
    case kernels::ElementType::float32:
      return round_row<float>(row, to);
    case kernels::ElementType::float16:
      return round_row<kernels::Float16>(row, to);
    case kernels::ElementType::bfloat16:
      return round_row<kernels::BFloat16>(row, to);
  }
}

/// Inputs: the arrays of the tiers, then the newest keys and values. Outputs: keys, values.
class RowsAsArrays : public NewArrays {
 public:
  RowsAsArrays(mx::Stream stream, std::vector<int> bits, std::vector<int> value_bits,
               int group_size)
      : NewArrays(stream, kRowsAsArrays),
        bits_{std::move(bits), std::move(value_bits)},
        group_size_(group_size) {}

  const char* name() const override { return "RowsAsArrays"; }

  bool is_equivalent(const Primitive& other) const override {
    const auto& that = static_cast<const RowsAsArrays&>(other);
    return bits_ == that.bits_ && group_size_ == that.group_size_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const size_t newest = inputs.size() - 2;
    std::vector<mx::Shape> shapes{inputs[newest].shape(), inputs[newest + 1].shape()};
    for (size_t first = 0; first < newest; first += kPerTier) {
      for (mx::Shape& shape : shapes) shape[2] += inputs[first].shape(2);
    }
    return shapes;
  }

 protected:
  void dispatch(mx::cpu::CommandEncoder& encoder, std::vector<mx::array> inputs,
                std::vector<mx::array> outputs) override {
    encoder.dispatch([bits = bits_, group_size = group_size_, inputs = std::move(inputs),
                      outputs = std::move(outputs)]() mutable {
      for (size_t side = 0; side < 2; ++side) {
        unpack(inputs, side, bits[side], group_size, outputs[side]);
      }
    });
  }

 private:
  static void unpack(const std::vector<mx::array>& inputs, size_t side,
                     const std::vector<int>& bits, int group_size, mx::array& to) {
    const int width = to.shape(3), rows = to.shape(2);
    const int64_t heads = int64_t{to.shape(0)} * to.shape(1);
    const kernels::ElementType type = element_type(to.dtype());
    const int64_t bytes = width * kernels::element_size(type);
    char* const first = to.data<char>();
    int64_t start = 0;
    for (size_t tier = 0; tier < bits.size(); ++tier) {
      const size_t at = kPerTier * tier + 3 * side;
      const Flat words(inputs[at]), scales(inputs[at + 1]), biases(inputs[at + 2]);
      // The kernels write such rows elsewhere: they take no const.
      const kernels::StoredRows stored{
          type,
          width,
          nullptr,
          {const_cast<uint32_t*>(words.data<uint32_t>()), const_cast<char*>(scales.data<char>()),
           const_cast<char*>(biases.data<char>()), bits[tier], group_size}};
      const int64_t count = inputs[at].shape(2);
      kernels::parallel_for(
          heads,
          [&](int64_t head) {
            std::vector<float> row(static_cast<size_t>(width));
            for (int64_t i = 0; i < count; ++i) {
              kernels::read_row(stored, head * count + i, row.data());
              round_row(type, row, first + (head * rows + start + i) * bytes);
            }
          },
          1);
      start += count;
    }
    const mx::array& newest = inputs[kPerTier * bits.size() + side];
    const Flat dense(newest);
    const int64_t count = newest.shape(2);
    for (int64_t head = 0; head < heads; ++head) {
      std::memcpy(first + (head * rows + start) * bytes, dense.data<char>() + head * count * bytes,
                  static_cast<size_t>(count * bytes));
    }
  }

  std::vector<std::vector<int>> bits_;  // of the keys and of the values of each tier
  int group_size_;
};

}  // namespace

std::vector<mx::array> rows_as_arrays(const std::vector<mx::array>& tiers, const mx::array& keys,
                                      const mx::array& values, const std::vector<int>& bits,
                                      const std::vector<int>& value_bits, int group_size,
                                      mx::StreamOrDevice s) {
  check_segments(tiers, keys, values, bits, value_bits, group_size);
  const mx::Stream stream = cpu_stream(kRowsAsArrays, s);
  std::vector<mx::array> inputs(tiers);
  inputs.insert(inputs.end(), {keys, values});
  auto primitive = std::make_shared<RowsAsArrays>(stream, bits, value_bits, group_size);
  return mx::array::make_arrays(primitive->output_shapes(inputs), {keys.dtype(), values.dtype()},
                                primitive, inputs);
}

}  // namespace mlx_h2o
