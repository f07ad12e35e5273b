// Memory for arrays, which may run out.
#pragma once

#include <stdexcept>
#include <string>

#include <mlx/array.h>

namespace mlx_h2o {

/// So many bytes of MLX's allocator, which returns none on CPUs where there are none.
inline mlx::core::allocator::Data memory_of(size_t bytes) {
  auto found = mlx::core::allocator::malloc(bytes);
  if (found.buffer().ptr() == nullptr) {
    throw std::runtime_error("[mlx_h2o] there is no memory for an array of " +
                             std::to_string(bytes) + " bytes.");
  }
  return found;
}

/// Gives the array memory of its own, whose contents are still to come.
inline void allocate(mlx::core::array& array) { array.set_data(memory_of(array.nbytes())); }

}  // namespace mlx_h2o
