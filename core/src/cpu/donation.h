// Outputs that start as a copy of an input, and take over its buffer if nothing else holds it.
#pragma once

#include <vector>

#include <mlx/array.h>

namespace mlx_h2o {

/// In MLX every output of a primitive holds all inputs, which makes each input look shared.
/// Releases those that the output under evaluation does not need; a traced graph keeps them. Call
/// it first in eval_cpu.
void release_sibling_inputs(const std::vector<mlx::core::array>& inputs,
                            std::vector<mlx::core::array>& outputs);

/// Gives `output`, of the same shape and dtype, the buffer of `input` if that is contiguous and
/// nothing else holds it; returns whether it did. Otherwise allocates memory, and the caller must
/// copy the contents (`copy_elements`).
bool take_over(const mlx::core::array& input, mlx::core::array& output);

}  // namespace mlx_h2o
