// Memory for arrays, which may run out.
#pragma once

#include <stdexcept>
#include <string>

#include <mlx/array.h>

namespace mlx_h2o {

/// Whether MLX's allocator found memory for the array: on CPUs it does not say so itself.
inline void check_memory(const mlx::core::array& array) {
  if (array.buffer().ptr() == nullptr) {
    throw std::runtime_error("[mlx_h2o] there is no memory for an array of " +
                             std::to_string(array.nbytes()) + " bytes.");
  }
}

/// Gives the array memory of its own, whose contents are still to come.
inline void allocate(mlx::core::array& array) {
  array.set_data(mlx::core::allocator::malloc(array.nbytes()));
  check_memory(array);
}

}  // namespace mlx_h2o
