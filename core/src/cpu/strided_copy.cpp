#include "cpu/strided_copy.h"

#include <array>
#include <cstdint>
#include <cstring>

#include "cpu/array_memory.h"

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
  allocate(result);
  encoder.add_temporary(result);
  encoder.dispatch([from = mx::array::unsafe_weak_copy(array),
                    to = mx::array::unsafe_weak_copy(result)]() mutable {
    copy_elements(from, to.data<void>());
  });
  return result;
}

void copy_elements(const mx::array& from, void* to) {
  if (from.flags().row_contiguous) {
    std::memcpy(to, from.data<void>(), from.nbytes());
    return;
  }
  FourSizes shape{1, 1, 1, 1};
  FourSizes strides{};
  const size_t missing = shape.size() - from.ndim();
  for (size_t axis = missing; axis < shape.size(); ++axis) {
    shape[axis] = from.shape(static_cast<int>(axis - missing));
    strides[axis] = from.strides(static_cast<int>(axis - missing));
  }
  if (from.itemsize() == 4) {
    copy(from.data<uint32_t>(), static_cast<uint32_t*>(to), shape, strides);
  } else {
    copy(from.data<uint16_t>(), static_cast<uint16_t*>(to), shape, strides);
  }
}

}  // namespace mlx_h2o
