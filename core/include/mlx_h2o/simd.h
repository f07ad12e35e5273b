// Which SIMD target the native kernels run on.
#pragma once

namespace mlx_h2o {

/// "scalar", "avx2", "avx512" or "neon": the best that this machine runs, or the one that the
/// environment variable MLX_H2O_SIMD names. Throws std::invalid_argument where that names none.
const char* simd_target_name();

}  // namespace mlx_h2o
