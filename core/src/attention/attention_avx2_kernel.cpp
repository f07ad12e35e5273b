// Attention's sweeps with AVX2.
#include "cpu/simd_regions.h"

#if defined(MLX_H2O_X86)
#include "attention/attention_for_target.h"

namespace mlx_h2o::kernels {
namespace {
MLX_H2O_BEGIN_TARGET(MLX_H2O_AVX2)
#include "cpu/simd_avx2.h"
//
#include "attention/attention_all.h"
MLX_H2O_END_TARGET
}  // namespace

const Phases avx2_attention = {attend_span, add_span, add_mass, finish_unit};

}  // namespace mlx_h2o::kernels
#endif
