// The memory of stored rows, for the kernels.
#pragma once

#include <mlx/array.h>

#include "cpu/element_type.h"
#include "quantized/quantization_kernel.h"

namespace mlx_h2o {

/// Contiguous rows of `width` elements in one array, in words and norms, or in words, scales and
/// biases. The kernels also write to rows of this type, so it takes no const.
inline kernels::StoredRows stored_rows(mlx::core::array* parts, size_t arrays,
                                       mlx::core::Dtype dtype, int width, int bits, int group_size,
                                       uint32_t seed = 0) {
  kernels::StoredRows rows{element_type(dtype), width};
  if (arrays == 1) {
    rows.dense = parts[0].data<void>();
    return rows;
  }
  rows.packed = {parts[0].data<uint32_t>(), parts[1].data<void>(), nullptr, bits, group_size};
  if (arrays == 2) {
    rows.packed.group_size = width;
    rows.packed.codes = &kernels::codebook(width, bits, seed);
  } else {
    rows.packed.biases = parts[2].data<void>();
  }
  return rows;
}

}  // namespace mlx_h2o
