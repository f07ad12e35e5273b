// What attention refuses, whatever its rows are stored as.
#pragma once

#include <vector>

#include <mlx/array.h>

#include "mlx_h2o/ops.h"

namespace mlx_h2o {

/// Keys or values: one array, or words, scales and biases.
using Rows = std::vector<mlx::core::array>;

/// [B, Hkv, N, D] of the rows, packed or not.
mlx::core::Shape shape_of_rows(const Rows& rows, int bits);

/// A mask that broadcasts to `pairs`, [B, Hq, Lq, N].
/// float32 [B, Hkv, N] of the keys' shape, or with room for more rows.
void check_row_bias(const char* operation, const mlx::core::array& bias,
                    const mlx::core::Shape& keys);

void check_mask(const char* operation, const mlx::core::array& mask, const mlx::core::Shape& pairs);

void check_attention(const char* operation, const mlx::core::array& queries, const Rows& keys,
                     const Rows& values, const AttentionOptions& options);

}  // namespace mlx_h2o
