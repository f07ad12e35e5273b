// Copies for the inputs whose layout the kernels cannot walk, or whose buffer is someone else's.
#pragma once

#include <cstdint>

#include <mlx/array.h>

#include "cpu/encoder.h"

namespace mlx_h2o {

/// The strides of the first `axes`.
inline void copy_strides(const mlx::core::array& from, int axes, int64_t* to) {
  for (int axis = 0; axis < axes; ++axis) to[axis] = from.strides(axis);
}

/// The array itself where its last axis has unit stride; else a contiguous copy, made on the
/// encoder's stream and alive until that stream has run what is dispatched next. At most four axes,
/// two or four bytes per element.
mlx::core::array with_unit_last_stride(const mlx::core::array& array,
                                       mlx::core::cpu::CommandEncoder& encoder);

/// Copies the elements of an evaluated array, of any strides, to contiguous memory, now: for use
/// inside a task. At most four axes, two or four bytes per element.
void copy_elements(const mlx::core::array& from, void* to);

}  // namespace mlx_h2o
