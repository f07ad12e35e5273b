#include "strided_copy.h"

#include <array>
#include <cstdint>

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

using FourSizes = std::array<int64_t, 4>;

template <typename Element>
void copy(const Element* from, Element* to, const FourSizes& shape, const FourSizes& strides) {
  for (int64_t i = 0; i < shape[0]; ++i) {
    for (int64_t j = 0; j < shape[1]; ++j) {
      for (int64_t k = 0; k < shape[2]; ++k) {
        const Element* row = from + i * strides[0] + j * strides[1] + k * strides[2];
        for (int64_t l = 0; l < shape[3]; ++l) *to++ = row[l * strides[3]];
      }
    }
  }
}

}  // namespace

mx::array with_unit_last_stride(const mx::array& array, mx::cpu::CommandEncoder& encoder) {
  if (array.strides(-1) == 1 || array.shape(-1) == 1) return array;
  mx::array result(array.shape(), array.dtype(), nullptr, {});
  result.set_data(mx::allocator::malloc(result.nbytes()));
  encoder.add_temporary(result);
  FourSizes shape{};
  FourSizes strides{};
  for (int axis = 0; axis < 4; ++axis) {
    shape[static_cast<size_t>(axis)] = array.shape(axis);
    strides[static_cast<size_t>(axis)] = array.strides(axis);
  }
  encoder.dispatch([from = mx::array::unsafe_weak_copy(array),
                    to = mx::array::unsafe_weak_copy(result), shape, strides]() mutable {
    if (from.itemsize() == 4) {
      copy(from.data<uint32_t>(), to.data<uint32_t>(), shape, strides);
    } else {
      copy(from.data<uint16_t>(), to.data<uint16_t>(), shape, strides);
    }
  });
  return result;
}

}  // namespace mlx_h2o
