#include "rows/row_kernel.h"

namespace mlx_h2o::kernels {

void round_row(ElementType type, const float* from, int width, void* to) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    for (int i = 0; i < width; ++i) static_cast<T*>(to)[i] = round_to<T>(from[i]);
  });
}

int64_t element_size(ElementType type) { return type == ElementType::float32 ? 4 : 2; }

void read_row(const StoredRows& from, int64_t row, float* to) {
  if (from.dense == nullptr) {
    return dequantize_row(from.type, packed_row(from.type, from.packed, from.width, row),
                          from.width, to);
  }
  const void* first =
      static_cast<const char*>(from.dense) + row * from.width * element_size(from.type);
  with_type(from.type, [&](auto zero) {
    const auto* elements = static_cast<const decltype(zero)*>(first);
    for (int i = 0; i < from.width; ++i) to[i] = to_float(elements[i]);
  });
}

}  // namespace mlx_h2o::kernels
