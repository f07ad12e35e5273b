// Copies for the inputs whose last axis the kernels cannot walk.
#pragma once

#include "encoder.h"

#include <mlx/array.h>

namespace mlx_h2o {

/// The array itself where its last axis has unit stride; else a contiguous copy, made on the
/// encoder's stream and alive until that stream has run what is dispatched next. Four axes, two or
/// four bytes per element.
mlx::core::array with_unit_last_stride(const mlx::core::array& array,
                                       mlx::core::cpu::CommandEncoder& encoder);

}  // namespace mlx_h2o
