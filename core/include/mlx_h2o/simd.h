// Which SIMD target the native kernels run on.
#pragma once

#include <string>
#include <vector>

namespace mlx_h2o {

/// "scalar", "avx2", "avx512" or "neon": the best target of this machine, or the one that the
/// environment variable MLX_H2O_SIMD names. Throws std::invalid_argument for an unknown name.
std::string simd_target();

/// Every target that this machine can run, the best first.
std::vector<std::string> simd_targets();

}  // namespace mlx_h2o
