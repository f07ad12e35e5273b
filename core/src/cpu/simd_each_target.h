// Compiles MLX_H2O_SWEEPS, the name of a header, once for each SIMD target, in the namespaces
// scalar, avx2, avx512 and neon, after the target's Vector. Include first what that header needs.
// Then MLX_H2O_CALL_TARGET(target, call) calls a function in the target's namespace. No include
// guard: a file may compile several headers this way.
#include "cpu/simd_regions.h"

namespace scalar {
#include "cpu/simd_scalar.h"
//
#include MLX_H2O_SWEEPS
}  // namespace scalar

#if defined(MLX_H2O_X86)
#if !defined(__clang__)
// GCC blames us for undefined lanes inside its own AVX-512 header (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
MLX_H2O_BEGIN_TARGET(MLX_H2O_AVX2)
namespace avx2 {
#include "cpu/simd_avx2.h"
//
#include MLX_H2O_SWEEPS
}  // namespace avx2
MLX_H2O_END_TARGET

MLX_H2O_BEGIN_TARGET(MLX_H2O_AVX512)
namespace avx512 {
#include "cpu/simd_avx512.h"
//
#include MLX_H2O_SWEEPS
}  // namespace avx512
MLX_H2O_END_TARGET
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#elif defined(MLX_H2O_ARM)
namespace neon {
#include "cpu/simd_neon.h"
//
#include MLX_H2O_SWEEPS
}  // namespace neon
#endif

#undef MLX_H2O_CALL_TARGET
#if defined(MLX_H2O_X86)
#define MLX_H2O_CALL_TARGET(target, ...)                \
  ((target) == SimdTarget::avx512 ? avx512::__VA_ARGS__ \
   : (target) == SimdTarget::avx2 ? avx2::__VA_ARGS__   \
                                  : scalar::__VA_ARGS__)
#elif defined(MLX_H2O_ARM)
#define MLX_H2O_CALL_TARGET(target, ...) \
  ((target) == SimdTarget::neon ? neon::__VA_ARGS__ : scalar::__VA_ARGS__)
#else
#define MLX_H2O_CALL_TARGET(target, ...) (static_cast<void>(target), scalar::__VA_ARGS__)
#endif
