// Converts dtypes to the types of the kernels.
#pragma once

#include <mlx/dtype.h>
#include <mlx/utils.h>

#include "attention/attention_kernel.h"

namespace mlx_h2o {

/// For one of the three float dtypes that the operations accept.
inline kernels::ElementType element_type(mlx::core::Dtype dtype) {
  if (dtype == mlx::core::float16) return kernels::ElementType::float16;
  if (dtype == mlx::core::bfloat16) return kernels::ElementType::bfloat16;
  return kernels::ElementType::float32;
}

/// Half of the dtype's lowest finite value: models pass that value as well as -inf.
inline float mask_threshold(mlx::core::Dtype dtype) {
  return dtype == mlx::core::bool_ ? 0.0f : static_cast<float>(mlx::core::finfo(dtype).min / 2);
}

}  // namespace mlx_h2o
