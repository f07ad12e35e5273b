// Attention's sweeps with NEON.
#include "cpu/simd_regions.h"

#if defined(MLX_H2O_ARM)
#include "attention/attention_for_target.h"

namespace mlx_h2o::kernels {
namespace {
#include "cpu/simd_neon.h"
//
#include "attention/attention_all.h"
}  // namespace

const Phases neon_attention = {attend_span, add_span, add_mass, finish_unit};

}  // namespace mlx_h2o::kernels
#endif
