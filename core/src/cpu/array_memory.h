// Allocates memory for arrays, and reports when there is none.
#pragma once

#include <stdexcept>
#include <string>

#include <mlx/array.h>

namespace mlx_h2o {

/// Checks that MLX's allocator found memory for the array: on CPUs MLX does not check.
inline void check_memory(const mlx::core::array& array) {
  if (array.buffer().ptr() == nullptr) {
    throw std::runtime_error("[mlx_h2o] there is no memory for an array of " +
                             std::to_string(array.nbytes()) + " bytes.");
  }
}

/// Gives the array its own memory, not yet filled.
inline void allocate(mlx::core::array& array) {
  array.set_data(mlx::core::allocator::malloc(array.nbytes()));
  check_memory(array);
}

}  // namespace mlx_h2o
