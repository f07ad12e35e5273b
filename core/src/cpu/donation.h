// Outputs that start as a copy of an input, and take over its buffer where nobody else holds it.
#pragma once

#include <vector>

#include <mlx/array.h>

namespace mlx_h2o {

/// Every output of a primitive holds all of its inputs, which would make each input look shared.
/// Lets go of those that the output under evaluation does not need; a traced graph keeps them.
/// Call it first in eval_cpu.
void release_sibling_inputs(const std::vector<mlx::core::array>& inputs,
                            std::vector<mlx::core::array>& outputs);

/// Gives `output`, of the same shape and dtype, the buffer of `input` where nothing else holds it
/// and it is contiguous; returns whether it did. Else allocates, and the contents are still to be
/// copied (`copy_elements`).
bool take_over(const mlx::core::array& input, mlx::core::array& output);

}  // namespace mlx_h2o
