// Copies inputs whose layout the kernels cannot read, or whose buffer something else holds.
#pragma once

#include <cstdint>

#include <mlx/array.h>

#include "cpu/encoder.h"

namespace mlx_h2o {

/// The strides of the first `axes`.
inline void copy_strides(const mlx::core::array& from, int axes, int64_t* to) {
  for (int axis = 0; axis < axes; ++axis) to[axis] = from.strides(axis);
}

/// Returns the array itself if its last axis has unit stride; else a contiguous copy, made on the
/// encoder's stream and alive until the stream has run the next dispatched task. At most four axes,
/// two or four bytes per element.
mlx::core::array with_unit_last_stride(const mlx::core::array& array,
                                       mlx::core::cpu::CommandEncoder& encoder);

/// Copies the elements of an evaluated array with any strides to contiguous memory at once, for use
/// inside a task. At most four axes, two or four bytes per element.
void copy_elements(const mlx::core::array& from, void* to);

}  // namespace mlx_h2o
