#include "row_kernel.h"

#include <cstring>
#include <limits>
#include <type_traits>

#include "half.h"

namespace mlx_h2o::kernels {
namespace {

void write_row(const StoredRows& to, int64_t row, const void* from, SimdTarget target) {
  if (to.dense == nullptr) {
    return quantize_row(to.type, from, to.width, packed_row(to.type, to.packed, to.width, row),
                        target);
  }
  const int64_t bytes = to.width * element_size(to.type);
  std::memcpy(static_cast<char*>(to.dense) + row * bytes, from, static_cast<size_t>(bytes));
}

template <typename T>
void to_floats(const void* from, int count, float* to) {
  const T* elements = static_cast<const T*>(from);
  for (int i = 0; i < count; ++i) to[i] = to_float(elements[i]);
}

}  // namespace

void round_row(ElementType type, const float* from, int width, void* to) {
  const auto round = [&](auto* elements) {
    using T = std::remove_pointer_t<decltype(elements)>;
    for (int i = 0; i < width; ++i) elements[i] = round_to<T>(from[i]);
  };
  switch (type) {
    case ElementType::float32:
      return round(static_cast<float*>(to));
    case ElementType::float16:
      return round(static_cast<Float16*>(to));
    case ElementType::bfloat16:
      return round(static_cast<BFloat16*>(to));
  }
}

int64_t element_size(ElementType type) { return type == ElementType::float32 ? 4 : 2; }

void read_row(const StoredRows& from, int64_t row, float* to) {
  if (from.dense == nullptr) {
    return dequantize_row(from.type, packed_row(from.type, from.packed, from.width, row),
                          from.width, to);
  }
  const void* first =
      static_cast<const char*>(from.dense) + row * from.width * element_size(from.type);
  switch (from.type) {
    case ElementType::float32:
      return to_floats<float>(first, from.width, to);
    case ElementType::float16:
      return to_floats<Float16>(first, from.width, to);
    case ElementType::bfloat16:
      return to_floats<BFloat16>(first, from.width, to);
  }
}

void write_rows(const RowArguments& a, SimdTarget target) {
  for (int64_t head = 0; head < int64_t{a.batch} * a.heads; ++head) {
    const int64_t batch = head / a.heads;
    const int64_t of_batch = head % a.heads;
    const int64_t row = head * a.rows + a.slots[head];
    const auto new_row = [&](const void* rows, const int64_t* strides, ElementType type) {
      const int64_t offset = batch * strides[0] + of_batch * strides[1];
      return static_cast<const char*>(rows) + offset * element_size(type);
    };
    write_row(a.keys, row, new_row(a.new_keys, a.new_key_strides, a.keys.type), target);
    write_row(a.values, row, new_row(a.new_values, a.new_value_strides, a.values.type), target);
    a.importance[row] = std::numeric_limits<float>::quiet_NaN();
    a.positions[row] = a.position[batch * a.position_stride];
  }
}

}  // namespace mlx_h2o::kernels
