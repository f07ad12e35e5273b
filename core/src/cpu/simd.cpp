#include "mlx_h2o/simd.h"

#include "attention/attention_kernel.h"

namespace mlx_h2o {

std::string simd_target() { return kernels::target_name(kernels::simd_target()); }

std::vector<std::string> simd_targets() {
  std::vector<std::string> names;
  for (kernels::SimdTarget target : kernels::kSimdTargets) {
    if (kernels::is_supported(target)) names.emplace_back(kernels::target_name(target));
  }
  return names;
}

}  // namespace mlx_h2o
