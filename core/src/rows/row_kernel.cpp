#include "rows/row_kernel.h"

#include <type_traits>

#include "cpu/half.h"

namespace mlx_h2o::kernels {
namespace {

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

}  // namespace mlx_h2o::kernels
