// Chooses the SIMD target at run time and divides the work among threads.
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "attention/attention_phases.h"
#include "cpu/thread_pool.h"

#if defined(MLX_H2O_X86)
#include <cpuid.h>
#endif

namespace mlx_h2o::kernels {
namespace {

const Phases& phases_of(SimdTarget target) {
  switch (target) {
#if defined(MLX_H2O_X86)
    case SimdTarget::avx2:
      return avx2_attention;
    case SimdTarget::avx512:
      return avx512_attention;
#elif defined(MLX_H2O_ARM)
    case SimdTarget::neon:
      return neon_attention;
#endif
    default:
      return scalar_attention;
  }
}

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
  const Plan plan(arguments);
  return static_cast<size_t>(plan.wave * plan.unit_floats);
}

bool is_supported(SimdTarget target) {
  switch (target) {
    case SimdTarget::scalar:
      return true;
#if defined(MLX_H2O_X86)
    case SimdTarget::avx2: {
      // The __builtin_cpu_supports of older clang does not know f16c.
      unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
      const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
      return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    }
    case SimdTarget::avx512:
      return is_supported(SimdTarget::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
#elif defined(MLX_H2O_ARM)
    case SimdTarget::neon:
      return true;
#endif
    default:
      return false;
  }
}

const char* target_name(SimdTarget target) {
  static constexpr const char* kNames[] = {"scalar", "avx2", "avx512", "neon"};
  return kNames[static_cast<int>(target)];
}

SimdTarget simd_target() {
  static const SimdTarget target = choose_target();
  return target;
}

void attention(const AttentionArguments& arguments, SimdTarget target, float* workspace) {
  const Plan plan(arguments);
  const Phases& phases = phases_of(target);
  for (int64_t first = 0; first < plan.units; first += plan.wave) {
    const int64_t units = std::min(plan.wave, plan.units - first);
    const auto unit_of = [&](int64_t unit, int64_t span) {
      return Piece(arguments, plan, first + unit, span, workspace + unit * plan.unit_floats);
    };
    const auto for_spans = [&](auto phase) {
      parallel_for(units * plan.spans, [&](int64_t item) {
        const int64_t span = item % plan.spans;
        const Piece piece = unit_of(item / plan.spans, span);
        phase(arguments, plan, piece, Partial(plan, piece, span));
      });
    };
    for_spans(phases.attend_span);
    if (plan.two_phases) for_spans(phases.add_span);
    if (arguments.mass) {
      parallel_for(units * plan.spans, [&](int64_t item) {
        phases.add_mass(arguments, plan, unit_of(item / plan.spans, item % plan.spans));
      });
    }
    for (int64_t unit = 0; unit < units; ++unit) {
      phases.finish_unit(arguments, plan, unit_of(unit, 0));
    }
  }
}

}  // namespace mlx_h2o::kernels
