// Compiles the sweeps once per SIMD target and chooses among them at run time.
#include "attention_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "half.h"
#include "simd_regions.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mlx_h2o::kernels {
namespace {

constexpr int kKeyBlock = 64;
constexpr int kMaxRows = 256;
constexpr int64_t kWorkspaceFloats = int64_t{1} << 22;  // where one row does not need more

// Whole vectors of the widest target.
int64_t padded(int width) { return (static_cast<int64_t>(width) + 15) / 16 * 16; }

int64_t floats_per_row(const AttentionArguments& a) {
  const int64_t scores = a.return_scores ? 0 : a.key_count;
  return padded(a.width) + padded(a.value_width) + kKeyBlock + scores;
}

// How many (query head, query) rows of a KV head share one pass over its keys and values.
int rows_together(const AttentionArguments& a) {
  const int64_t rows = static_cast<int64_t>(a.query_heads / a.kv_heads) * a.query_count;
  const int64_t fitting = std::max<int64_t>(1, kWorkspaceFloats / floats_per_row(a));
  return static_cast<int>(std::min({rows, fitting, static_cast<int64_t>(kMaxRows)}));
}

namespace scalar {
#include "simd_scalar.h"
//
#include "simd_partial.h"
//
#include "attention_tiles.h"
//
#include "attention_sweeps.h"
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
#include "attention_tiles.h"
//
#include "attention_sweeps.h"
}  // namespace avx2
MLX_H2O_END_TARGET

MLX_H2O_BEGIN_TARGET(MLX_H2O_AVX512)
namespace avx512 {
#include "simd_avx512.h"
//
#include "simd_partial.h"
//
#include "attention_tiles.h"
//
#include "attention_sweeps.h"
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
#include "attention_tiles.h"
//
#include "attention_sweeps.h"
}  // namespace neon
#endif

SimdTarget choose_target() {
  std::string supported;
  const char* wanted = std::getenv("MLX_H2O_SIMD");
  const bool automatic = wanted == nullptr || *wanted == '\0';
  for (SimdTarget target : kSimdTargets) {
    if (!is_supported(target)) continue;
    if (automatic || std::strcmp(wanted, target_name(target)) == 0) return target;
    supported += supported.empty() ? "" : ", ";
    supported += target_name(target);
  }
  throw std::invalid_argument("[mlx_h2o] MLX_H2O_SIMD is \"" + std::string(wanted) +
                              "\", expected one that this machine runs: " + supported + ".");
}

}  // namespace

size_t attention_workspace_size(const AttentionArguments& arguments) {
  const int64_t queries = arguments.accumulate ? arguments.query_count : 0;
  return static_cast<size_t>(rows_together(arguments) * floats_per_row(arguments) +
                             queries * accumulation_workspace_size(arguments.key_count));
}

bool is_supported(SimdTarget target) {
  switch (target) {
    case SimdTarget::scalar:
      return true;
#if defined(__x86_64__)
    case SimdTarget::avx2: {
      // __builtin_cpu_supports of older clang does not know f16c.
      unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
      const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
      return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    }
    case SimdTarget::avx512:
      return is_supported(SimdTarget::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
#elif defined(__aarch64__)
    case SimdTarget::neon:
      return true;
#endif
    default:
      return false;
  }
}

const char* target_name(SimdTarget target) {
  switch (target) {
    case SimdTarget::scalar:
      return "scalar";
    case SimdTarget::avx2:
      return "avx2";
    case SimdTarget::avx512:
      return "avx512";
    case SimdTarget::neon:
      return "neon";
  }
  return "";
}

SimdTarget simd_target() {
  static const SimdTarget target = choose_target();
  return target;
}

void attention(const AttentionArguments& arguments, SimdTarget target, float* workspace) {
  switch (target) {
#if defined(__x86_64__)
    case SimdTarget::avx2:
      return avx2::attention(arguments, workspace);
    case SimdTarget::avx512:
      return avx512::attention(arguments, workspace);
#elif defined(__aarch64__)
    case SimdTarget::neon:
      return neon::attention(arguments, workspace);
#endif
    default:
      return scalar::attention(arguments, workspace);
  }
}

}  // namespace mlx_h2o::kernels
