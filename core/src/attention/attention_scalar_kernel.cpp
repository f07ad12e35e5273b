// Attention's sweeps on every processor.
#include "attention/attention_for_target.h"

namespace mlx_h2o::kernels {
namespace {
#include "cpu/simd_scalar.h"
//
#include "attention/attention_all.h"
}  // namespace

const Phases scalar_attention = {attend_span, add_span, add_mass, finish_unit};

}  // namespace mlx_h2o::kernels
