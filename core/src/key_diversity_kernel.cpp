// Compiles the sweeps once per SIMD target and chooses among them at run time.
#include "key_diversity_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"
#include "simd_regions.h"

namespace mlx_h2o::kernels {
namespace {

constexpr float kLeastNorm = 1e-12f;

namespace scalar {
#include "simd_scalar.h"
//
#include "simd_partial.h"
//
#include "key_diversity_sweeps.h"
}  // namespace scalar

#if defined(__x86_64__)
#if !defined(__clang__)
// GCC takes the undefined lanes inside its own AVX-512 header for ours (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
MLX_H2O_BEGIN_TARGET(MLX_H2O_AVX2)
namespace avx2 {
#include "simd_avx2.h"
//
#include "simd_partial.h"
//
#include "key_diversity_sweeps.h"
}  // namespace avx2
MLX_H2O_END_TARGET

MLX_H2O_BEGIN_TARGET(MLX_H2O_AVX512)
namespace avx512 {
#include "simd_avx512.h"
//
#include "simd_partial.h"
//
#include "key_diversity_sweeps.h"
}  // namespace avx512
MLX_H2O_END_TARGET
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#elif defined(__aarch64__)
namespace neon {
#include "simd_neon.h"
//
#include "simd_partial.h"
//
#include "key_diversity_sweeps.h"
}  // namespace neon
#endif

}  // namespace

int64_t key_diversity_workspace_size(const KeyDiversityArguments& arguments) {
  return (static_cast<int64_t>(arguments.width) + 15) / 16 * 16;  // vectors of the widest target
}

void key_diversity(const KeyDiversityArguments& arguments, SimdTarget target, float* workspace) {
  switch (target) {
#if defined(__x86_64__)
    case SimdTarget::avx2:
      return avx2::key_diversity(arguments, workspace);
    case SimdTarget::avx512:
      return avx512::key_diversity(arguments, workspace);
#elif defined(__aarch64__)
    case SimdTarget::neon:
      return neon::key_diversity(arguments, workspace);
#endif
    default:
      return scalar::key_diversity(arguments, workspace);
  }
}

}  // namespace mlx_h2o::kernels
