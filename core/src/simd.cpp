#include "mlx_h2o/simd.h"

#include "attention_kernel.h"

namespace mlx_h2o {

const char* simd_target_name() { return kernels::target_name(kernels::simd_target()); }

}  // namespace mlx_h2o
