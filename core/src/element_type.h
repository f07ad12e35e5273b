// The kernels' name of a dtype.
#pragma once

#include <mlx/dtype.h>

#include "attention_kernel.h"

namespace mlx_h2o {

/// Of one of the three float dtypes that the operations accept.
inline kernels::ElementType element_type(mlx::core::Dtype dtype) {
  if (dtype == mlx::core::float16) return kernels::ElementType::float16;
  if (dtype == mlx::core::bfloat16) return kernels::ElementType::bfloat16;
  return kernels::ElementType::float32;
}

}  // namespace mlx_h2o
